"""A client's request with its answers (one per prompt and choice), and the response built from them."""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from functools import lru_cache, partial

import msgspec

from controller.frontend.errors import ApiError, invalid, too_long, unsupported
from controller.frontend.openai import writers
from controller.frontend.openai.choice import Choice, ResponseWriter
from controller.frontend.openai.output_formats import OutputFormats, is_parsed, parser_of
from controller.frontend.openai.parsed_writers import ParsedBufferedWriter, ParsedStreamingWriter
from controller.frontend.openai.request_head import Call
from controller.frontend.openai.request_parser import ParsedRequest
from controller.frontend.openai.sse import DONE, INEXACT, SseStream
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
        asked, of_prompt = parsed.sampling, parsed.logprobs_of_prompt
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
            # the logprobs of a prompt arrive together with those of the first token
            logprobs=0 if parsed.logprobs is of_prompt is None else max(1, parsed.logprobs or 0),
            prompt_logprobs=of_prompt,
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
        self._parsed = parsed = call.parsed
        created = int(time.time())  # noqa: TID251 (shown to the client, compared with nothing)
        self._formats = admitted.formats
        special = parsed.special or is_parsed(parsed, admitted.formats)
        fingerprint = system_fingerprint(parsed.model, *admitted.lineage)
        self._format = writers.ResponseFormat(parsed, admitted.tokens, call.id, created, special, fingerprint)
        self.stream = stream
        self.over: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        self.answers: list[Choice] = []
        forbidden = "n_over_1" if parsed.n > 1 else ""
        if parsed.guided and admitted.constraint is None:
            forbidden = forbidden or "guided_decoding"
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
                    overrides=call.head.overrides,
                    traceparent=call.head.trace,
                )
                accepted: list[int] = []
                writer = self._writer(prompt, text, accepted)
                self.answers.append(Choice(request, writer, migration_limit, forbidden, accepted))
        self._left = len(self.answers)
        if stream is not None:
            stream.answers = self.answers

    def _writer(self, prompt: list[int], text: str, accepted: list[int]) -> ResponseWriter:
        """Return the writer of the next answer. `accepted` is the growing list of this answer's tokens."""
        format, parsed, context = self._format, self._parsed, writers.PLAIN
        if parsed.detailed:
            echoed = (text or format.tokens.decode(prompt)) if parsed.echo else parsed.echo_text
            requested = parsed.logprobs_of_prompt is not None
            shown = (text or format.tokens.decode(prompt, special=True)) if parsed.prompt_text else ""
            context = writers.AnswerContext(prompt, echoed, shown, accepted, requested)
        index = len(self.answers)
        if is_parsed(parsed, self._formats):
            parser = partial(parser_of, parsed, self._formats, text, f"{format.request}-{index}")
            if self.stream is None:
                return ParsedBufferedWriter(format, context, parser)
            return ParsedStreamingWriter(format, self.stream, index, context, parser())
        if self.stream is None:
            return writers.BufferedWriter(format, context)
        return writers.StreamingWriter(format, self.stream, index, context)

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
            stream.end(writers.event(error.body()))
        else:
            if self._parsed.include_usage:
                stream.parts.append(self._format.total(self.usage()))
            if any(not answer.exact for answer in self.answers):
                stream.parts.append(INEXACT)
            stream.end(DONE)

    def usage(self) -> dict[str, object]:
        """Return the token usage: the prompt tokens, and the accepted tokens of all answers, over all attempts."""
        # plain loops, because generators take four times as long
        made = read = cached = 0
        for answer in self.answers:
            made += len(answer.accepted)
        # choices of one prompt share its tokens, so each prompt is counted once
        for answer in self.answers[:: self._parsed.n]:
            read += len(answer.request.prompt)
            cached += answer.cached_tokens or 0
        total = writers.usage(read, 0 if self._parsed.silent else made)
        return total | {"prompt_tokens_details": {"cached_tokens": cached}}

    def body(self) -> dict[str, object]:
        """Return the response body of a request that is not streamed."""
        parts = enumerate(answer.writer for answer in self.answers)
        choices = [part.choice(index) for index, part in parts if isinstance(part, writers.BufferedWriter)]
        name = "chat.completion" if self._parsed.chat else "text_completion"
        more = {"usage": self.usage(), "system_fingerprint": self._format.fingerprint}
        whole = self._format.response(name, choices) | more
        if self._parsed.chat and self._parsed.token_ids:
            whole["prompt_token_ids"] = self.answers[0].request.prompt
        if self._parsed.chat:  # a chat has one prompt, so these are beside its choices
            for name in ("prompt_logprobs", "prompt_text"):
                values = [choice.pop(name) for choice in choices if name in choice]
                whole |= {name: values[0]} if values else {}
        return whole


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
    of_prompt = parsed.logprobs_of_prompt
    if of_prompt is not None and prompt_tokens * (of_prompt + 1) > ECHOED_LOGPROBS_MAX:
        why = f"{prompt_tokens} prompt tokens with {of_prompt + 1} each are more than {ECHOED_LOGPROBS_MAX}"
        field = "logprobs" if of_prompt == parsed.logprobs and parsed.echo else "prompt_logprobs"
        raise invalid(f"{field}: {why}", field)
    least = parsed.sampling.min_tokens
    if least > wanted:
        raise invalid(f"min_tokens {least} is more than max_tokens {wanted}", "min_tokens")
    # at least one token must be generated, because the prompt's logprobs arrive with a token
    return wanted if of_prompt is None else max(1, wanted)


def refuse_unsupported(parsed: ParsedRequest, group: EndpointGroup) -> None:
    """Raise ApiError (400) if the workers do not support an option of the request: logprobs or token ids."""
    for name, wanted in (
        ("logprobs", parsed.logprobs is not None),
        ("prompt_logprobs", parsed.prompt_logprobs is not None),
        ("return_token_ids", parsed.token_ids),
        ("add_special_tokens", parsed.special_tokens not in (None, not parsed.chat)),
    ):
        if wanted and group.text_only:
            raise unsupported(name, "this model's servers return text only")
