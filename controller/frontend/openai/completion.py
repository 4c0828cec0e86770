"""One request of a client and its answers, one per prompt and choice, and the response that is made of them all."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from controller.frontend.errors import ApiError, invalid, too_long, unsupported
from controller.frontend.openai.request_parser import ParsedRequest, RequestedSampling
from controller.frontend.openai.sse import DONE, SseStream
from controller.frontend.openai.writers import (
    AnswerContext,
    BufferedWriter,
    ResponseFormat,
    ResponseWriter,
    StreamingWriter,
    event,
)
from controller.frontend.request.routing_overrides import EXPLAIN, NO_OVERRIDES, RoutingOverrides
from controller.frontend.request.state import GenerationRequest
from controller.router.endpoints import Endpoint, EndpointGroup, Lineage
from events.blocks import BlockNames
from events.wire import Sampling

COMPLETION_TOKENS_DEFAULT = 16  # what OpenAI's completions endpoint does without max_tokens
SEED_BITS = 31
ECHOED_LOGPROBS_MAX = 100_000  # of one prompt: 5 MB of an answer, and a tenth of a second for everybody else
SUSPECT = "X-Holdfast-Suspect"
EXPLAINED_MAX = 8  # candidates in a header: clients take 8 KB of them or so


class AdmittedRequest(msgspec.Struct, frozen=True):
    """A request that has been let in, tokenised."""

    parsed: ParsedRequest
    request: str  # its id
    tier: str
    lineage: Lineage
    prompts: Sequence[
        tuple[list[int], str, BlockNames]
    ]  # tokens, the text if it was one, and its blocks' names
    group: EndpointGroup  # the workers of its lineage, as it was let in
    serial: int  # of this frontend's requests: unseeded sampling is seeded with it
    traceparent: str = ""
    overrides: RoutingOverrides = NO_OVERRIDES
    arrived: float | None = None  # by the frontend's monotonic clock
    first_token_by: float | None = None  # by the same, where it was let in by a deadline


class Choice(msgspec.Struct, eq=False):
    """One answer of a request: what is asked for, where it is written, and what has become of it."""

    request: GenerationRequest
    writer: ResponseWriter
    migration_limit: int = 3  # attempts beyond the first
    forbidden: str = ""  # why it may not move once its client has a token
    number: int = 0  # of the live request
    accepted: list[int] = []  # tokens
    cached_tokens: int | None = None  # of the prompt, at the first worker that reports it
    endpoint: Endpoint | None = None  # the worker that it is with, or was with last
    explained: dict[str, Any] | None = None  # why its first worker was chosen, if that was asked
    finish: str | None = None
    error: ApiError | None = None


class Completion:
    """One request of a client: its answers, and the response that is made of them."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        format: ResponseFormat,
        stream: SseStream | None,
        *,
        priority: int,
        migration_limit: int,
    ) -> None:
        """Make the answers, and send none yet. Without `stream` the response is given whole. `priority`: at the worker. Raise
        ApiError (400)."""
        self._parsed = admitted.parsed
        self._format = format
        self.stream = stream
        self.over: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        self.answers: list[Choice] = []
        self._left = len(admitted.prompts) * admitted.parsed.n
        for prompt, text, names in admitted.prompts:
            for choice in range(admitted.parsed.n):
                self._add(admitted, prompt, text, names, choice, priority, migration_limit)

    def _add(
        self,
        admitted: AdmittedRequest,
        prompt: list[int],
        text: str,
        names: BlockNames,
        choice: int,
        priority: int,
        migration_limit: int,
    ) -> None:
        parsed = admitted.parsed
        writer, context = self._writer(len(self.answers), prompt, text)
        wanted = sampling(parsed, len(prompt), admitted.group, choice, admitted.serial)
        if admitted.group.engine == "openai" or (parsed.sampling.unset and self._format.tokens.defaults):
            wanted = self._with_defaults(admitted, wanted)
        request = GenerationRequest(
            id=admitted.request,
            model=parsed.model,
            lineage=admitted.lineage,
            prompt=prompt,
            prompt_text=text,
            sampling=wanted,
            guided=parsed.guided,
            deterministic=admitted.group.engine != "openai" or _repeats_anywhere(parsed.sampling),
            names=names,
            tier=admitted.tier,
            priority=priority,
            arrived=admitted.arrived,
            first_token_by=admitted.first_token_by,
            cache_salt=parsed.cache_salt,
            overrides=admitted.overrides,
            traceparent=admitted.traceparent,
        )
        forbidden = "n_over_1" if parsed.n > 1 else "guided_decoding" if parsed.guided else ""
        answer = Choice(request, writer, migration_limit, forbidden)
        if context is not None:
            context.accepted = answer.accepted
        self.answers.append(answer)

    def _with_defaults(self, admitted: AdmittedRequest, found: Sampling) -> Sampling:
        """Return how tokens are chosen: what the client left out by the server's defaults behind the openai engine, else by those
        of the model's folder."""
        parsed, group = admitted.parsed, admitted.group
        unset, defaults = parsed.sampling.unset, self._format.tokens.defaults
        if group.engine == "openai":
            seed = found.seed if parsed.sampling.seed is not None else None
            return msgspec.structs.replace(found, seed=seed, unset=list(unset))
        if not defaults or not unset:
            return found
        return msgspec.structs.replace(found, **{name: defaults[name] for name in unset if name in defaults})

    def _writer(
        self, index: int, prompt: list[int], text: str
    ) -> tuple[ResponseWriter, AnswerContext | None]:
        """Return what writes the answer with this index, and what it knows of the answer besides its text."""
        format, stream, wanted = self._format, self.stream, self._parsed.details
        context: AnswerContext | None = None
        if wanted is not None:
            echoed = (text or format.tokens.decode(prompt)) if wanted.echo else ""
            context = AnswerContext(wanted, prompt, echoed, self._silent)
        if stream is None:
            return BufferedWriter(format, context), context
        return StreamingWriter(format, stream, index, context), context

    @property
    def _silent(self) -> bool:
        """Whether nothing is wanted but the prompt: what is generated, for its logprobs, is not shown."""
        return self._parsed.sampling.max_tokens == 0

    # --- the end ------------------------------------------------------------------------------------------

    def ended(self, answer: Choice) -> None:
        """One answer is over; the last one ends the response, and so does the first that fails."""
        self._left -= 1
        if answer.error is not None:
            self.finish(answer.error)
        elif self._left == 0 and answer.finish != "cancelled":
            self.finish(None)

    def finish(self, error: ApiError | None) -> None:
        """End the response, with an error or well."""
        if self.over.done():
            return
        self.over.set_result(error)
        stream = self.stream
        if stream is None or (error is not None and not stream.started):
            if stream is not None:
                stream.parts.clear()
            return
        if error is not None:
            return stream.end(event(error.body()))
        if self._parsed.include_usage:
            stream.parts.append(self._format.total(self.usage()))
        stream.end(DONE)

    def usage(self) -> dict[str, Any]:
        """Return the usage: the client's own prompt, and every token that was accepted, over all attempts."""
        prompt = made = cached = 0
        for place, answer in enumerate(self.answers):
            made += 0 if self._silent else len(answer.accepted)
            if place % self._parsed.n == 0:  # the choices of a prompt share it
                prompt += len(answer.request.prompt)
                cached += answer.cached_tokens or 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def body(self) -> dict[str, Any]:
        """Return the whole answer of a request that is not streamed."""
        writers = [answer.writer for answer in self.answers]
        choices = [writer.choice(i) for i, writer in enumerate(writers) if isinstance(writer, BufferedWriter)]
        format = self._format
        name = "chat.completion" if format.chat else "text_completion"
        head = {"id": format.id, "object": name, "created": format.created, "model": format.model}
        whole = head | {"choices": choices, "usage": self.usage()}
        if format.chat and self._parsed.details is not None and self._parsed.details.token_ids:
            whole["prompt_token_ids"] = self.answers[0].request.prompt
        return whole

    @property
    def headers(self) -> dict[str, str]:
        """What the answer's headers say of the choice of its worker."""
        name = self.worker if self.worker.isprintable() else ascii(self.worker)  # it registers as it likes
        headers = {"X-Holdfast-Worker": name} if name else {}
        for answer in self.answers:
            endpoint = answer.endpoint
            if endpoint is not None and (suspect := endpoint.suspect):
                headers[SUSPECT] = suspect if suspect.isprintable() else ascii(suspect)
        why = self.answers[0].explained
        if why is not None:
            headers[EXPLAIN] = json.dumps(_shortened(why))
        return headers

    @property
    def worker(self) -> str:
        """The worker that the first answer is with, or was with last."""
        endpoint = self.answers[0].endpoint
        return endpoint.worker if endpoint is not None else ""


def _shortened(why: dict[str, Any]) -> dict[str, Any]:
    """Return an explanation with the best candidates and the one that was chosen, and how many there were."""
    every, chosen = why["candidates"], why["chosen"]
    best = every[:EXPLAINED_MAX]
    best += [one for one in every[EXPLAINED_MAX:] if chosen.items() <= one.items()]
    return why | {"of": len(every), "candidates": best}


def sampling(
    parsed: ParsedRequest, prompt_tokens: int, group: EndpointGroup, choice: int, serial: int
) -> Sampling:
    """Return how the workers should choose tokens.

    Raise ApiError (400) if no worker of the group has a context for the request.
    """
    asked, context = parsed.sampling, group.context_tokens
    room = context - prompt_tokens
    if room < 1:
        raise too_long(prompt_tokens, context, "messages" if parsed.chat else "prompt")
    wanted = asked.max_tokens
    if wanted is None:
        wanted = group.answer_room(prompt_tokens)
        wanted = wanted if parsed.chat else min(wanted, COMPLETION_TOKENS_DEFAULT)
    if wanted > room:
        message = f"{prompt_tokens} prompt tokens and max_tokens {wanted} are more than the model's context {context}"
        raise invalid(message, "max_tokens", "context_length_exceeded")
    echoed = _echoed_logprobs(parsed, prompt_tokens)
    if asked.min_tokens > wanted:
        raise invalid(f"min_tokens {asked.min_tokens} is more than max_tokens {wanted}", "min_tokens")
    # An unseeded request gets a seed of ours: after a migration the random numbers go on where they were.
    seed = asked.seed if asked.seed is not None else (serial * 2_654_435_761 & (1 << SEED_BITS) - 1)
    return Sampling(
        max_tokens=wanted if echoed is None else max(1, wanted),  # they come with a token
        min_tokens=asked.min_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=seed + choice if asked.temperature > 0 else asked.seed,
        ignore_eos=asked.ignore_eos,
        stop_token_ids=list(asked.stop_token_ids),
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logprobs=0 if parsed.logprobs is None else max(1, parsed.logprobs),
        min_p=asked.min_p,
        logit_bias=asked.logit_bias,
        prompt_logprobs=echoed,
    )


def _echoed_logprobs(parsed: ParsedRequest, prompt_tokens: int) -> int | None:
    """Return how many logprobs of each of the prompt's tokens an echo shows; None: none. Raise ApiError (400) if all of them are
    too many."""
    if parsed.logprobs is None or parsed.details is None or not parsed.details.echo:
        return None
    numbers = prompt_tokens * (parsed.logprobs + 1)
    if numbers > ECHOED_LOGPROBS_MAX:
        why = f"{prompt_tokens} prompt tokens with {parsed.logprobs + 1} each are more than {ECHOED_LOGPROBS_MAX}"
        raise invalid(f"logprobs: with echo, {why}", "logprobs")
    return parsed.logprobs


def _repeats_anywhere(asked: RequestedSampling) -> bool:
    """Say whether somebody else's server goes on as the first one would have.

    Its random numbers start anew, and what it is given as a prompt it does not count as output.
    """
    return asked.temperature == 0 and not asked.presence_penalty and not asked.frequency_penalty


def refuse_unsupported(parsed: ParsedRequest, engine: str, *, text_only: bool) -> None:
    """Raise ApiError (400) if this engine cannot do what few requests ask for: an answer of a certain form, logprobs, tokens."""
    if parsed.guided and engine != "openai":
        raise unsupported(
            next(iter(parsed.guided)), f"the {engine} engine cannot constrain the form of its answer"
        )
    if parsed.logprobs is not None and text_only:
        raise unsupported("logprobs", "this model's servers give text only")
    if parsed.details is not None and parsed.details.token_ids and text_only:
        raise unsupported("return_token_ids", "this model's servers give text only")
