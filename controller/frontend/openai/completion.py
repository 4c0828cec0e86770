"""A client's request with its answers (one per prompt and choice), and the response built from them."""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from controller.frontend.errors import ApiError, invalid, too_long, unsupported
from controller.frontend.openai import writers
from controller.frontend.openai.choice import Choice, ResponseWriter
from controller.frontend.openai.request_head import Call
from controller.frontend.openai.request_parser import NO_DETAILS, ParsedRequest
from controller.frontend.openai.sse import DONE, SseStream
from controller.frontend.openai.text.tokenizer import Tokens
from controller.frontend.request.state import GenerationRequest
from controller.router.endpoints import EndpointGroup, Lineage
from events.blocks import BlockNames
from events.wire import Sampling

COMPLETION_TOKENS_DEFAULT = 16  # default of OpenAI's completions endpoint
SEED_BITS = 31
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
    serial: int  # serial number in this frontend, which seeds sampling if the client sets no seed
    # deadline of the first token by the frontend's monotonic clock; None without admission by deadlines
    first_token_by: float | None = None

    @property
    def repeatable(self) -> bool:
        """Whether any healthy worker would continue an answer with the same tokens as the worker that began the answer.

        This is false for external servers unless sampling is greedy, because they restart their random numbers, and
        do not count prompt tokens as output for penalties.
        """
        asked = self.call.parsed.sampling
        greedy = asked.temperature == 0 and not asked.presence_penalty and not asked.frequency_penalty
        return greedy or self.group.engine != "openai"

    def sampling(self, prompt_tokens: int, choice: int) -> Sampling:
        """Return the sampling parameters for the answer with this index. Raise ApiError (400) if they exceed the context.

        Parameters that the client left out are set by the model's folder. With the openai engine they are left to the
        server.
        """
        parsed, external = self.call.parsed, self.group.engine == "openai"
        asked = parsed.sampling
        defaults: dict[str, float] = {}
        if not external and self.tokens.defaults:
            given = self.tokens.defaults
            defaults = {name: given[name] for name in asked.unset if name in given}
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
            prompt_logprobs=parsed.logprobs if parsed.details.echo else None,
            unset=asked.unset if external else [],
            **defaults,
        )


class Completion:
    """A client's request with its answers, and the response that is built from the answers."""

    def __init__(
        self, admitted: AdmittedRequest, stream: SseStream | None, priority: int, migration_limit: int
    ) -> None:
        """Create the answers without sending them to workers.

        `stream` is None for a response that is not streamed. `priority` is the priority at the worker. Raise ApiError
        (400) if the request exceeds the context.
        """
        call = admitted.call
        self._parsed = parsed = call.parsed
        created = int(time.time())  # noqa: TID251 (shown to the client, compared with nothing)
        self._format = writers.ResponseFormat(parsed, admitted.tokens, call.id, created)
        self.stream = stream
        self.over: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        self.answers: list[Choice] = []
        forbidden = "n_over_1" if parsed.n > 1 else "guided_decoding" if parsed.guided else ""
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
        """Return the writer of the next answer. `accepted` is the list of the answer's tokens, which grows."""
        format, wanted, context = self._format, self._parsed.details, writers.PLAIN
        if wanted != NO_DETAILS:
            echoed = (text or format.tokens.decode(prompt)) if wanted.echo else ""
            due = wanted.echo and self._parsed.logprobs is not None
            context = writers.AnswerContext(wanted, prompt, echoed, self._silent, due, accepted)
        if self.stream is None:
            return writers.BufferedWriter(format, context)
        return writers.StreamingWriter(format, self.stream, len(self.answers), context)

    @property
    def _silent(self) -> bool:
        """Whether the client wants only the prompt.

        Tokens that are generated only for the prompt's logprobs are not shown.
        """
        return self._parsed.max_tokens == 0

    # --- the end ------------------------------------------------------------------------------------------

    def ended(self, answer: Choice) -> None:
        """Record that one answer has ended. The response ends with the last answer, or with the first answer that fails."""
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
            stream.end(DONE)

    def usage(self) -> dict[str, object]:
        """Return the token usage: the prompt tokens, and the accepted tokens of all answers, over all attempts."""
        # plain loops: this runs with every flush, and generators take four times as long
        made = read = cached = 0
        for answer in self.answers:
            made += len(answer.accepted)
        # choices of one prompt share its tokens, so each prompt is counted once
        for answer in self.answers[:: self._parsed.n]:
            read += len(answer.request.prompt)
            cached += answer.cached_tokens or 0
        total = writers.usage(read, 0 if self._silent else made)
        return total | {"prompt_tokens_details": {"cached_tokens": cached}}

    def body(self) -> dict[str, object]:
        """Return the response body of a request that is not streamed."""
        parts = [
            answer.writer for answer in self.answers if isinstance(answer.writer, writers.BufferedWriter)
        ]
        choices = [part.choice(index) for index, part in enumerate(parts)]
        name = "chat.completion" if self._parsed.chat else "text_completion"
        whole = self._format.response(name, choices) | {"usage": self.usage()}
        if self._parsed.chat and self._parsed.details.token_ids:
            whole["prompt_token_ids"] = self.answers[0].request.prompt
        return whole


def answer_tokens(parsed: ParsedRequest, prompt_tokens: int, group: EndpointGroup) -> int:
    """Return the maximum number of tokens of the answer to a prompt of this length.

    Raise ApiError (400) if no worker of the group has enough context for the request, or if the limits in the request
    contradict each other.
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
    echoed = parsed.logprobs is not None and parsed.details.echo
    each = (parsed.logprobs or 0) + 1
    if echoed and prompt_tokens * each > ECHOED_LOGPROBS_MAX:
        why = f"{prompt_tokens} prompt tokens with {each} each are more than {ECHOED_LOGPROBS_MAX}"
        raise invalid(f"logprobs: with echo, {why}", "logprobs")
    least = parsed.sampling.min_tokens
    if least > wanted:
        raise invalid(f"min_tokens {least} is more than max_tokens {wanted}", "min_tokens")
    # at least one token must be generated, because the prompt's logprobs arrive with a token
    return max(1, wanted) if echoed else wanted


def refuse_unsupported(parsed: ParsedRequest, group: EndpointGroup) -> None:
    """Raise ApiError (400) if the workers do not support an option of the request: constrained answers, logprobs or
    token ids.
    """
    if parsed.guided and group.engine != "openai":
        why = f"the {group.engine} engine does not support constrained answers"
        raise unsupported(next(iter(parsed.guided)), why)
    if group.text_only:
        if parsed.logprobs is not None:
            raise unsupported("logprobs", "this model's servers return text only")
        if parsed.details.token_ids:
            raise unsupported("return_token_ids", "this model's servers return text only")
