"""A client's request with its answers (one per prompt and choice), and the response built from them."""

import asyncio
import hashlib
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from controller.frontend.errors import ApiError, invalid, too_long, unsupported
from controller.frontend.openai.choice import Choice
from controller.frontend.openai.formats import AnswerFormat, ChatFormat, WholeResponse
from controller.frontend.openai.messages.events import MessagesFormat
from controller.frontend.openai.output_formats import OutputFormats
from controller.frontend.openai.proxied import ProxiedFormat
from controller.frontend.openai.request_head import Call
from controller.frontend.openai.request_parser import ParsedRequest
from controller.frontend.openai.responses.events import ResponsesFormat
from controller.frontend.openai.sse import SseStream
from controller.frontend.openai.text.tokenizer import Tokens
from controller.frontend.request.answer_grammar import AnswerGrammar
from controller.frontend.request.state import GenerationRequest
from controller.router.endpoints import EndpointGroup, Lineage
from events.blocks import BlockNames
from events.grammar.constraint import Constraint
from events.wire import Sampling

COMPLETION_TOKENS_DEFAULT = 16  # default of OpenAI's completions endpoint
SEED_BITS = 31
FINGERPRINT_CHARS = 10
FINGERPRINTS_KEPT = 1024
# maximum prompt tokens times logprobs per token: 5 MB of response, and a tenth of a second of the event loop
ECHOED_LOGPROBS_MAX = 100_000

FORMATS: dict[str, type[AnswerFormat]] = {
    "chat": ChatFormat,
    "completions": ChatFormat,
    "messages": MessagesFormat,
    "proxied": ProxiedFormat,
    "responses": ResponsesFormat,
}
"""By API: the format of its responses."""


class AdmittedRequest(msgspec.Struct, frozen=True):
    """A request that was admitted, with its tokenized prompts."""

    call: Call
    lineage: Lineage
    # for each prompt its tokens, its text (empty if the client gave tokens), and the names of its blocks
    prompts: Sequence[tuple[list[int], str, BlockNames]]
    group: EndpointGroup  # the workers of the request's lineage at its admission
    tokens: Tokens  # the tokenizer of these workers
    formats: OutputFormats  # the formats of the model's reasoning and tool calls
    constraint: Constraint | None  # the request's constraint as a grammar, if it has one
    bad_words: list[
        list[int]
    ]  # the request's bad words as tokens; empty if an external server tokenizes them
    serial: int  # serial number in this frontend, which seeds sampling if the client sets no seed
    # deadline of the first token by the frontend's monotonic clock; None without admission by deadlines
    first_token_by: float | None = None

    @property
    def repeatable(self) -> bool:
        """Whether an answer gets the same tokens if another healthy worker continues it.

        An external server that continues an answer receives the tokens so far as a part of the prompt. The server
        restarts its random numbers. It applies presence and frequency penalties, and bad words, only to the tokens
        that it generates itself. So this is false for external servers, unless sampling is greedy and without these.
        """
        asked = self.call.parsed.sampling
        counts = asked.presence_penalty or asked.frequency_penalty or asked.bad_words
        return (asked.temperature == 0 and not counts) or self.group.engine != "openai"

    def grammar(self, prompt: str) -> AnswerGrammar | None:
        """Return the grammar that constrains an answer to this prompt, or None if there is none."""
        if self.constraint is None:
            return None
        reasoning = self.formats.reasoning
        if reasoning is None:
            return AnswerGrammar(constraint=self.constraint)
        return AnswerGrammar(
            constraint=self.constraint,
            reasoning_start=reasoning.start,
            reasoning_end=reasoning.end,
            in_reasoning=reasoning.begins_in_reasoning(prompt),
        )

    def sampling(self, prompt_tokens: int, choice: int) -> Sampling:
        """Return the sampling parameters for the answer with the index `choice`.

        Parameters that the client left out are set to the defaults in the model's folder. With the openai engine they
        are left to the external server. Raise ApiError (400) if the request exceeds the context, or if its limits
        contradict each other.
        """
        parsed, external = self.call.parsed, self.group.engine == "openai"
        asked = parsed.sampling
        given = None if external else self.tokens.defaults
        defaults = {name: given[name] for name in asked.unset if name in given} if given else {}
        seed = asked.seed
        if asked.temperature > 0:
            # with Holdfast's own engines, a seed lets the random numbers continue after a migration
            if seed is None and not external:
                seed = self.serial * 2_654_435_761 & (1 << SEED_BITS) - 1
            seed = None if seed is None else seed + choice
        return msgspec.structs.replace(
            asked,
            max_tokens=answer_tokens(parsed, prompt_tokens, self.group),
            seed=seed,
            logprobs=0 if parsed.logprobs is None else max(1, parsed.logprobs),
            prompt_logprobs=parsed.logprobs if parsed.echo else None,
            unset=asked.unset if external else [],
            bad_words=asked.bad_words if external else [],
            bad_word_tokens=self.bad_words,
            **defaults,
        )


class Completion:
    """A client's request with its answers, and the response that is built from the answers."""

    def __init__(
        self, admitted: AdmittedRequest, stream: SseStream | None, priority: int, migration_limit: int
    ) -> None:
        """Create the answers without sending them to workers.

        `stream` is None for a response that is not streamed. `priority` orders the answers at a worker; 0 is the best.
        `migration_limit` is the number of attempts of each answer beyond the first. Raise ApiError (400) if the
        request exceeds the context.
        """
        call = admitted.call
        parsed = call.parsed
        fingerprint = system_fingerprint(parsed.model, *admitted.lineage)
        self.format = FORMATS[parsed.api](call, admitted.tokens, admitted.formats, stream, fingerprint)
        self.stream = stream
        self.over: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        self.answers: list[Choice] = []
        forbidden = "n_over_1" if parsed.n > 1 else ""
        if parsed.guided and admitted.constraint is None:
            forbidden = forbidden or "guided_decoding"
        if parsed.proxied is not None:
            forbidden = "proxied"
        for prompt, text, names in admitted.prompts:
            for choice in range(parsed.n):
                request = GenerationRequest(
                    id=call.id,
                    model=parsed.model,
                    lineage=admitted.lineage,
                    prompt=prompt,
                    prompt_text=text,
                    sampling=admitted.sampling(len(prompt), choice),
                    guided=parsed.guided,
                    grammar=None if parsed.guided is None else admitted.grammar(text),
                    deterministic=admitted.repeatable,
                    names=names,
                    tier=call.head.tier,
                    priority=priority,
                    arrived=call.arrived,
                    first_token_by=admitted.first_token_by,
                    cache_salt=parsed.cache_salt,
                    proxied=parsed.proxied,
                    adapter=parsed.adapter,
                    overrides=call.head.overrides,
                    traceparent=call.head.trace,
                )
                accepted: list[int] = []
                writer = self.format.writer(len(self.answers), prompt, text, accepted)
                self.answers.append(Choice(request, writer, migration_limit, forbidden, accepted))
        self._left = len(self.answers)
        if stream is not None:
            stream.answers = self.answers

    # --- the end ------------------------------------------------------------------------------------------

    def ended(self, answer: Choice) -> None:
        """Record that one answer has ended. End the response if all answers have ended or this answer has failed."""
        self._left -= 1
        if answer.error is not None:
            self.finish(answer.error)
        elif self._left == 0 and answer.finish != "cancelled":
            self.finish(None)

    def finish(self, error: ApiError | None) -> None:
        """End the response: with this error, or successfully if `error` is None."""
        if self.over.done():
            return
        self.over.set_result(error)
        stream = self.stream
        if stream is None:
            return
        if error is not None and not stream.started:
            stream.parts.clear()
        elif error is not None:
            stream.end(self.format.failed(error, self.answers))
        else:
            stream.end(self.format.last(self.answers))

    def whole(self) -> WholeResponse:
        """Return the response to a request that is not streamed."""
        return self.format.whole(self.answers)


@lru_cache(FINGERPRINTS_KEPT)
def system_fingerprint(model: str, revision: str, tokenizer: str) -> str:
    """Return the `system_fingerprint` of a model: it changes with the model's revision and its tokenizer."""
    return f"fp_{hashlib.sha256(repr((model, revision, tokenizer)).encode()).hexdigest()[:FINGERPRINT_CHARS]}"


def answer_tokens(parsed: ParsedRequest, prompt_tokens: int, group: EndpointGroup) -> int:
    """Return the maximum number of tokens of the answer to a prompt of this length.

    Raise ApiError (400) if no worker of the group has enough context for the request, if `min_tokens` exceeds
    `max_tokens`, or if an echo would have too many logprobs.
    """
    context, wanted = group.context_tokens, parsed.max_tokens
    room = context - prompt_tokens
    if room < 1:
        raise too_long(prompt_tokens, context, "messages" if parsed.chat else "prompt")
    if wanted is None:
        wanted = group.answer_room(prompt_tokens)
        wanted = wanted if parsed.chat else min(wanted, COMPLETION_TOKENS_DEFAULT)
    if wanted > room:
        message = f"{prompt_tokens} prompt tokens and max_tokens {wanted} are more than the model's context {context}"
        raise invalid(message, "max_tokens", "context_length_exceeded")
    each = (parsed.logprobs or 0) + 1
    if parsed.echoes_logprobs and prompt_tokens * each > ECHOED_LOGPROBS_MAX:
        why = f"{prompt_tokens} prompt tokens with {each} each are more than {ECHOED_LOGPROBS_MAX}"
        raise invalid(f"logprobs: with echo, {why}", "logprobs")
    least = parsed.sampling.min_tokens
    if least > wanted:
        raise invalid(f"min_tokens {least} is more than max_tokens {wanted}", "min_tokens")
    # at least one token must be generated, because the prompt's logprobs arrive with a token
    return max(1, wanted) if parsed.echoes_logprobs else wanted


def refuse_unsupported(parsed: ParsedRequest, group: EndpointGroup) -> None:
    """Raise ApiError (400) if the workers do not support an option of the request: logprobs or token ids."""
    for name, wanted in (("logprobs", parsed.logprobs is not None), ("return_token_ids", parsed.token_ids)):
        if wanted and group.text_only:
            raise unsupported(name, "this model's servers return text only")
