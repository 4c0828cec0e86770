"""What a response looks like: the events of a stream, the choices in them, and logprobs, as OpenAI's clients read them."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import msgspec

from controller.frontend.openai.text.incremental_detokenizer import IncrementalDetokenizer
from controller.frontend.openai.text.tokenizer import Tokens
from events.wire import Logprob

# What is the same in all answers is made once for each index among a request's answers: of four JSON objects that each
# stream made, one is left (4 % of a request).
CHOICES_KEPT = 256


class ResponseFormat(msgspec.Struct):
    """What every part of one response shares. Nobody changes it."""

    id: str
    model: str
    created: int
    chat: bool
    usage: bool  # a stream's chunks carry "usage": null, because the last one will carry it
    tokens: Tokens
    stops: tuple[str, ...]
    min_tokens: int
    logprobs: int | None
    logprobs_by_id: bool = False  # they name tokens by their ids
    before: bytes = b""  # what stands before the choices in every event of a stream
    after: bytes = b""  # and behind them, where it is not the last event

    def __post_init__(self) -> None:
        name = "chat.completion.chunk" if self.chat else "text_completion"
        whole = {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": (),
        }
        self.before = b"data: " + msgspec.json.encode(whole)[:-2]
        self.after = b'],"usage":null}\n\n' if self.usage else b"]}\n\n"

    def detokenizer(self) -> IncrementalDetokenizer:
        """Return a new detokenizer for one answer, with its stop strings."""
        return IncrementalDetokenizer(self.tokens.detokenizer(), self.stops, self.min_tokens)

    def name_of(self, token: int) -> str:
        """Return what logprobs call a token: its text, or its id where the client wants that."""
        return f"token_id:{token}" if self.logprobs_by_id else self.tokens.text_of(token)

    def chunk(self, index: int, text: str | None, logprobs: Any, finish: str | None) -> bytes:
        """Return one event of a stream."""
        return b"%b%b%b" % (self.before, _choice(self.chat, index, text, logprobs, finish), self.after)

    def total(self, usage: Mapping[str, Any]) -> bytes:
        """Return the event that carries the usage of the whole answer."""
        return b'%b],"usage":%b}\n\n' % (self.before, msgspec.json.encode(usage))


def _choice(chat: bool, index: int, text: str | None, logprobs: Any, finish: str | None) -> bytes:
    """Return one choice of an event."""
    choice: dict[str, Any] = {"index": index}
    if chat:
        choice["delta"] = {} if text is None else {"content": text}
    else:
        choice["text"] = text or ""
    choice |= {"logprobs": logprobs, "finish_reason": finish}
    return msgspec.json.encode(choice)


def event(body: dict[str, Any]) -> bytes:
    """Return a body as one server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(body)


@lru_cache(CHOICES_KEPT)
def around(chat: bool, index: int, after: bytes) -> tuple[bytes, bytes]:
    """Return what stands in an event before a token's text, from its choice on, and what after it."""
    mark = "\x00"
    before, behind = _choice(chat, index, mark, None, None).split(json.dumps(mark).encode())
    return before, behind + after


@lru_cache(CHOICES_KEPT)
def opening(index: int) -> bytes:
    """Return the choice that begins a chat answer."""
    delta = {"role": "assistant", "content": ""}
    return msgspec.json.encode({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})


@lru_cache(CHOICES_KEPT)
def ending(chat: bool, index: int, reason: str) -> bytes:
    """Return the choice that says why an answer has ended."""
    return _choice(chat, index, None, None, reason)


def show_logprobs(
    format: ResponseFormat, tokens: Sequence[int], logprobs: Sequence[Logprob], offset: int
) -> dict[str, Any]:
    """Return logprobs in the shape that the endpoint's clients expect. `offset`: characters of the answer before them.

    A completion's `top_logprobs` have the chosen token too, as OpenAI says ("up to logprobs+1 elements"): with 0, it alone.
    """
    k = format.logprobs or 0
    if format.chat:
        return {"content": [_chat_logprob(format, t, lp, k) for t, lp in zip(tokens, logprobs, strict=False)]}
    sizes = (len(format.tokens.text_of(token)) for token in tokens)
    offsets = list(accumulate(sizes, initial=offset))[:-1]
    name = format.name_of
    tops = [
        {name(token): lp.chosen} | {name(t): value for t, value in lp.top[:k]}
        for token, lp in zip(tokens, logprobs, strict=False)
    ]
    chosen = [lp.chosen for lp in logprobs]
    names = [name(token) for token in tokens]
    return {"tokens": names, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}


def _chat_logprob(format: ResponseFormat, token: int, logprob: Logprob, k: int) -> dict[str, Any]:
    top = [_named(format, other, value) for other, value in logprob.top[:k]]
    return _named(format, token, logprob.chosen) | {"top_logprobs": top}


def _named(format: ResponseFormat, token: int, value: float) -> dict[str, Any]:
    return {"token": format.name_of(token), "logprob": value, "bytes": list(format.tokens.bytes_of(token))}
