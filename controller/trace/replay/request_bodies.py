"""Encodes prompts for a server: as token ids if it accepts these, else as text or chat messages.

Blocks with the same hash id get the same tokens or words. The words are common ones, which have one token each in most
vocabularies. The exact number of words per token is measured at the server.
"""

import json
from dataclasses import dataclass
from functools import _lru_cache_wrapper, lru_cache  # the first is the type that the second returns
from random import Random
from typing import Literal

from controller.trace.replay.answer import ReplayedAnswer
from controller.trace.replay.endpoint import BadEndpoint, ReplayTarget, words
from controller.trace.synthesis import block

Form = Literal["token ids", "text", "chat"]
VOCABULARY = range(300, 1000)  # valid in any vocabulary, without a special meaning
CACHED_TOKENS_MAX = 8_000_000  # of encoded blocks in the cache, 4 bytes each
PROBE_S_MAX = 60.0
PROBE_TOKENS = 2
PROBE_TIMES = (1, 4)  # repetitions of the word list
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_COMMON = (
    "the and you that was for are with his they this have from one had word but not what all were when your can said there "
    "use each which she how their will other about out many then them these some her would make like him into time has look "
    "two more write see number way could people than first water been call who its now find long down day did get come made"
)
WORDS = _COMMON.split()
# not every server accepts fields beyond OpenAI's API
_EXTRAS: tuple[dict[str, object], ...] = ({"ignore_eos": True}, {})


@dataclass(frozen=True, slots=True)
class PromptRecipe:
    """The recipe of a prompt: the blocks with the ids `blocks`, one after another, cut to `length` tokens.

    If `blocks` is empty, the prompt consists of unique tokens, which are derived from `name`.
    """

    length: int  # tokens
    blocks: list[int]
    block_tokens: int
    name: str


class Wording:
    """Encodes request bodies in the form that one server accepts."""

    def __init__(
        self, model: str, form: Form, *, extra: dict[str, object], words_per_token: float = 1.0
    ) -> None:
        self.form = form
        self.path = CHAT if form == "chat" else COMPLETIONS
        opened, closed = {"token ids": ("[", "]"), "text": ('"', '"')}.get(
            form, ('[{"role":"user","content":"', '"}]')
        )
        field = "messages" if form == "chat" else "prompt"
        self._before = f'{{"model":{json.dumps(model)},"{field}":{opened}'.encode()
        rest = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **extra}
        self._after = f"{closed},{json.dumps(rest)[1:-1]},".encode() + b'"max_tokens":%d}'
        self._between = b"," if form == "token ids" else b" "
        self._words_per_token = 1.0 if form == "token ids" else words_per_token
        self._blocks: _lru_cache_wrapper[bytes] | None = None

    def body(self, prompt: PromptRecipe, max_tokens: int) -> bytes:
        """Return the body of a request with this prompt and an answer of at most `max_tokens` tokens."""
        return self._around(self._text(prompt), max_tokens)

    def probe(self, times: int) -> bytes:
        """Return the body of a request with a prompt that contains the whole word list `times` times."""
        return self._around(" ".join(WORDS * times).encode(), PROBE_TOKENS)

    @property
    def blocks_written(self) -> int:
        """Number of block encodings so far. A block that is still in the cache of encoded blocks is not encoded again."""
        return self._blocks.cache_info().misses if self._blocks is not None else 0

    def _around(self, text: bytes, max_tokens: int) -> bytes:
        return self._before + text + self._after % max_tokens

    def _text(self, prompt: PromptRecipe) -> bytes:
        if not prompt.blocks:
            return self._encoded(prompt.name, max(1, self._pieces(prompt.length)))
        if self._blocks is None:
            self._blocks = lru_cache(max(1, CACHED_TOKENS_MAX // prompt.block_tokens))(self._encoded)
        parts: list[bytes] = []
        begin = end = 0
        for place, name in enumerate(prompt.blocks, 1):
            # rounds the position of a block's end, because errors of rounded lengths would add up
            begin, end = end, max(end + 1, self._pieces(place * prompt.block_tokens))
            parts.append(self._blocks(name, end - begin))
        if (last := max(1, self._pieces(prompt.length) - begin)) < end - begin:
            parts[-1] = self._between.join(parts[-1].split(self._between)[:last])
        return self._between.join(parts)

    def _pieces(self, tokens: int) -> int:
        """Return how many token ids or words make a text of `tokens` tokens."""
        return round(tokens * self._words_per_token)

    def _encoded(self, name: int | str, size: int) -> bytes:
        if self.form == "token ids":
            return b",".join(b"%d" % token for token in block(name, size, VOCABULARY))
        return " ".join(Random(name).choices(WORDS, k=size)).encode()


async def find(target: ReplayTarget, model: str, *, chat: bool) -> Wording:
    """Send short requests to detect which form of prompt a server accepts, and return the encoder for that form.

    Raise BadEndpoint if the server accepts no known form.
    """
    forms: tuple[Form, ...] = ("chat",) if chat else ("token ids", "text")
    said = ""
    for form in forms:
        for extra in _EXTRAS:
            wording = Wording(model, form, extra=extra)
            said, _ = await _probe(
                target, wording, wording.body(PromptRecipe(3, [], 3, "probe"), PROBE_TOKENS)
            )
            if not said and form == "token ids":
                return wording
            if not said:
                return Wording(model, form, extra=extra, words_per_token=await _measured(target, wording))
    raise BadEndpoint(f"{target.url} fails to answer a {'chat' if chat else 'completion'}: {said}")


async def _measured(target: ReplayTarget, wording: Wording) -> float:
    """Return the number of words per token, from the server's token counts of two prompts.

    The difference of the two counts is used, so that the tokens of the chat template cancel out. Raise BadEndpoint if the
    server does not answer or does not report plausible counts.
    """
    counted = []
    for times in PROBE_TIMES:
        said, answer = await _probe(target, wording, wording.probe(times))
        if said or not answer.prompt_tokens:
            raise BadEndpoint(
                f"{target.url} does not count a prompt's tokens (usage){': ' if said else ''}{said}"
            )
        counted.append(answer.prompt_tokens)
    if counted[1] <= counted[0]:
        raise BadEndpoint(f"{target.url} counts as many tokens in a long prompt as in a short one")
    return (PROBE_TIMES[1] - PROBE_TIMES[0]) * len(WORDS) / (counted[1] - counted[0])


async def _probe(target: ReplayTarget, wording: Wording, body: bytes) -> tuple[str, ReplayedAnswer]:
    """Send a request for a few tokens. Return the error ("" if there is none) and the answer.

    Raise BadEndpoint if the server cannot be reached or does not answer in time.
    """
    answer = ReplayedAnswer()
    reply = await target.ask("POST", wording.path, body, take=answer.take, deadline_s=PROBE_S_MAX)
    if reply.fault in ("unreachable", "timeout"):
        raise BadEndpoint(f"{target.url} does not answer: {reply.detail}")
    if reply.fault or reply.status != 200:
        return f"{reply.status}: {words(reply.body)}" if reply.status else reply.detail, answer
    return answer.fault[1] or ("" if answer.done else "its answer is not a stream of events"), answer
