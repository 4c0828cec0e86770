"""One live request: one answer that is being made, with all that the frontend holds for it.

A record without policy. Its state is written by the driver alone, through the request state machine; whatever selects requests
(stall watch, preemption, planned moves, placement) reads it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import msgspec

from controller.frontend.admission.admission import Reservation
from controller.frontend.dispatch.kv_move import KvMove
from controller.frontend.health.exposure import Exposures, ServedSpan
from controller.frontend.openai.choice import Choice, ResponseWriter
from controller.frontend.openai.completion import Completion
from controller.frontend.openai.text.detokenizer import InvalidOutput
from controller.frontend.openai.text.tokenizer import Tokens
from controller.frontend.request.events import TransferAdvanced
from controller.frontend.request.state import (
    AnswerProgress,
    GenerationRequest,
    RequestState,
    budget_ended,
    stays,
)
from controller.frontend.request_metrics import ModelMetrics
from controller.migration import live as kv
from controller.ports import LostCause
from controller.router.endpoints import Endpoint, Key
from controller.router.load.active_sequences import ActiveSequences
from events.wire import Chunk, Generate, Logprob


class Dispatch(msgspec.Struct, eq=False):
    """An attempt as it is counted outside the machine: where it runs, and under which numbers. It never changes."""

    endpoint: Endpoint
    rank: int | None  # the one of several DP ranks
    stream: int  # its number on the request plane
    slot: int  # its number in the slot tracker
    routed_under: int  # the fleet's last decision when it was routed
    breaker_epoch: int  # the last move of this frontend's own breakers then
    before: "Dispatch | None"
    claimed: int = 0  # prompt tokens that its worker said it had cached


LOGPROB_FLOOR = -9.0  # one in 8,000: correct samplers draw few tokens below it, a broken one mostly such


@dataclass(slots=True, eq=False, repr=False)  # a struct takes twenty times as long to change
class OutputStats:
    """When the tokens of one answer came, how many are counted, and the spans that workers served."""

    metrics: ModelMetrics
    exposures: Exposures
    tracker: ActiveSequences | None  # counts tokens too
    movable_max: float  # accepted tokens; inf: there is no limit, or more were counted already
    arrived_at: float  # when the request came
    attempt_at: float  # when the last attempt was sent
    last_at: float  # when the last token came; before the first: when the request was to be sent
    first_at: float | None = None
    cached_tokens: int | None = None  # of the prompt, at the first worker that reports it
    counted: int = 0  # accepted tokens when the last turn ended
    weighed: int = 0  # tokens with logprobs
    unlikely: int = 0  # those of them that are improbable
    own: ServedSpan | None = None  # of the present worker, from its first token on
    sources: tuple[ServedSpan, ...] = ()  # of the workers whose KV cache it has taken over

    def first_output(self, now: float) -> None:
        """The first token of the answer has come."""
        self.first_at = now
        self.metrics.ttft.note(now - self.arrived_at)

    def weigh(self, logprobs: Sequence[Logprob]) -> None:
        """Count tokens that came with logprobs, and those below the floor."""
        self.weighed += len(logprobs)
        self.unlikely += sum(one.chosen < LOGPROB_FLOOR for one in logprobs)

    def count(self, live: "LiveRequest", now: float) -> None:
        """Count the accepted tokens that are new: all of them came from the present attempt, in this turn."""
        dispatch, accepted, counted = live.dispatch, len(live.accepted), self.counted
        new = accepted - counted
        if dispatch is not None and accepted > self.movable_max:
            self.note_length(live)
        if not new or dispatch is None:
            return
        metrics, own = self.metrics, self.own
        if own is None:
            request = live.request
            own = self.own = ServedSpan(
                request.id,
                request.model,
                counted,
                live.answer.number,
                request.traceparent,
                dispatch.rank,
                dispatch.endpoint.key,
            )
            self.exposures.note(own)
        own.add(now, new)
        for source in self.sources:
            source.add(now, new)
        if self.tracker is not None:
            self.tracker.output(dispatch.slot, new)
        metrics.tokens += new
        if counted:
            metrics.itl.add((now - self.last_at) / new, new)
        self.counted = accepted
        self.last_at = now

    def note_length(self, live: "LiveRequest") -> None:
        """Count a request that is too long to move, once, if it could have moved before."""
        if not budget_ended(live.state):
            self.movable_max = inf
            self.metrics.outgrown()

    # --- provenance

    def depends_on(self, key: Key) -> bool:
        """Return whether what comes now is computed from what this worker computed."""
        return any(span.key == key for span in self._open)

    def hand_over(self) -> None:
        """Another worker continues, with the KV cache of the present one."""
        self.sources, self.own = self._open, None

    def leave(self) -> None:
        """What comes from now on is computed anew."""
        for span in self._open:
            self.exposures.close(span)
        self.sources, self.own = (), None

    @property
    def _open(self) -> tuple[ServedSpan, ...]:
        return (*self.sources, self.own) if self.own is not None else self.sources

    def ended(self, live: "LiveRequest", now: float, *, well: bool) -> None:
        """The answer is over: as its client wanted it, or not."""
        accepted, metrics, arrived_at = len(live.accepted), self.metrics, self.arrived_at
        metrics.ended(now - arrived_at, accepted, self.cached_tokens)
        if not well or self.first_at is None:
            return
        by = live.request.first_token_by
        metrics.traffic.ended(
            len(live.request.prompt),
            accepted,
            self.first_at - arrived_at,
            (self.last_at - self.first_at) / (accepted - 1) if accepted > 1 else 0.0,
            None if by is None else by - arrived_at,
        )


class Continuation(msgspec.Struct):
    """All that was accepted of one answer, as the next worker must be told it."""

    _request: GenerationRequest
    accepted: list[int]  # it grows with every step
    tokens: Tokens
    texts: list[str] = []  # what came from engines that give text and no tokens, and all before it
    _worded: int = 0  # accepted tokens that `texts` says

    def request(self, endpoint: Endpoint, rank: int = 0) -> Generate:
        """Return what this worker, and of its DP ranks this one, is asked for now."""
        asked, made = self._request, len(self.accepted)
        sampling = asked.sampling
        if made:
            left = sampling.max_tokens - made
            floor = max(0, sampling.min_tokens - made)
            sampling = msgspec.structs.replace(
                sampling, max_tokens=left, min_tokens=floor, prompt_logprobs=None
            )
        return Generate(
            stream=0,
            request=asked.id,
            tokens=self._whole(),
            prompt_tokens=len(asked.prompt),
            sampling=sampling,
            guided=asked.guided,
            prompt_text=self._prompt_text() + self._text() if endpoint.joined.engine == "openai" else "",
            traceparent=asked.traceparent,
            cache_salt=asked.cache_salt,
            rank=rank,
            cache_epoch=endpoint.cache_epoch,
            priority=asked.priority,
        )

    def take_text(self, text: str) -> int:
        """Accept a text that came without tokens, and return of how many tokens it is."""
        tokens = self.tokens.encode_next(text)
        self.texts += (self._unworded(), text)
        self.accepted += tokens
        self._worded = len(self.accepted)
        return len(tokens)

    def rewind(self, count: int) -> None:
        """Forget what came after the first `count` tokens."""
        del self.accepted[count:]
        self.texts.clear()
        self._worded = 0

    def _whole(self) -> list[int]:
        """Return the prompt and all that was accepted.

        What came as text is read anew together with the prompt: tokenizers of Llama 2's kind put a space before each
        piece that they read by itself.
        """
        request = self._request
        if self.texts:
            encode, prompt_text = self.tokens.encode, self._prompt_text()
            for special in (False, True):
                if encode(prompt_text, special=special) == request.prompt:
                    return encode(prompt_text + self._text(), special=special)
        return request.prompt + self.accepted if self.accepted else request.prompt

    def _prompt_text(self) -> str:
        """Return the prompt as text, for engines that take nothing else."""
        return self._request.prompt_text or self.tokens.decode(self._request.prompt)

    def _text(self) -> str:
        """Return all that was accepted as text, whether it came as text or as tokens."""
        return "".join(self.texts) + self._unworded()

    def _unworded(self) -> str:
        """Return the text of the tokens that came after the last text, as it follows from what stands before them.

        A character of which only some bytes have come is left out: a worker that continues in text gives it whole.
        """
        accepted, worded = self.accepted, self._worded
        if worded == len(accepted):
            return ""
        decode, prompt = self.tokens.decode, self._request.prompt
        before, whole = decode(prompt + accepted[:worded]), decode(prompt + accepted)
        if not whole.startswith(before):
            before, whole = "", decode(accepted[worded:])
        return whole[len(before) :].rstrip("\ufffd")


@dataclass(slots=True, eq=False, repr=False)  # see `OutputStats`
class LiveRequest:
    """One answer that is being made."""

    answer: Choice
    completion: Completion | None  # learns of the end; None once the answer has ended
    request: GenerationRequest  # these three are the answer's
    writer: ResponseWriter
    accepted: list[int]
    state: RequestState
    stats: OutputStats
    continuation: Continuation
    max_tokens: int
    dispatch: Dispatch | None = None  # the attempt that is read now
    last_dispatch: Dispatch | None = None
    kv_move: KvMove | None = None  # a KV transfer under way
    room: Reservation | None = None  # given back for it, or (`keeps_room`) kept for it
    keeps_room: bool = False
    over: bool = False
    exposure: str = ""  # what was done when its tokens were last found to be exposed
    attempt_tokens: int = 0  # the prefill of the last attempt: the prompt and the tokens accepted before it

    @property
    def endpoint(self) -> Endpoint | None:
        """The worker that it is with."""
        return self.dispatch.endpoint if self.dispatch is not None else None

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what was accepted."""
        return len(self.request.prompt) + len(self.accepted)

    @property
    def progress(self) -> AnswerProgress:
        """How far the answer is, for the state machine."""
        return AnswerProgress(len(self.accepted), self.writer.reached, bool(self.continuation.texts))

    @property
    def stays(self) -> bool:
        """Whether it is not to be moved on purpose: where some of it came as text, the next worker would read it anew."""
        return self.over or bool(self.continuation.texts) or stays(self.state.terms, len(self.accepted))

    def begin(self, dispatch: Dispatch, now: float) -> None:
        """Read a new attempt from now on."""
        accepted = len(self.accepted)
        self.dispatch = self.last_dispatch = dispatch
        self.room = None
        self.answer.endpoint = dispatch.endpoint
        if dispatch.before is not None:
            self.stats.attempt_at = now
        self.attempt_tokens = len(self.request.prompt) + accepted
        if accepted > self.stats.movable_max:
            self.stats.note_length(self)

    def advanced(self, event: kv.Event) -> TransferAdvanced:
        """Return an event of its KV transfer, for the state machine."""
        base = self.kv_move.base if self.kv_move is not None else len(self.accepted)
        return TransferAdvanced(event, tuple(self.accepted[base:]))

    def keep_room(self) -> None:
        """Keep the room that the request was admitted with, and that was given back for it."""
        if self.room is not None:
            self.room = self.room.again()
            self.keeps_room = True

    def give_back(self) -> None:
        """Give back the room that was kept."""
        if self.keeps_room and self.room is not None:
            self.keeps_room = False
            self.room.free()

    def turned_away(self, dispatch: Dispatch) -> None:
        """Forget an attempt for which its worker had no room."""
        before = self.last_dispatch = dispatch.before
        self.answer.endpoint = None if before is None else before.endpoint

    # --- what the request plane reads it through: see `RequestSink`

    def take(self, chunk: Chunk) -> None:
        """Accept one step's output for this stream."""
        raise NotImplementedError

    def flush(self) -> None:
        """Count and write what one turn of the loop has brought."""
        raise NotImplementedError

    def lost(self, cause: LostCause, detail: str) -> None:
        """The connection broke, or the worker hangs."""
        raise NotImplementedError

    # --- tokens: the log of accepted tokens is what is replayed, not what the client has read

    def accept(self, chunk: Chunk) -> bool:
        """Accept tokens as they are. Return whether a stop string was reached. Raise InvalidOutput."""
        tokens, writer, accepted = chunk.tokens, self.writer, self.accepted
        if len(accepted) + len(tokens) > self.max_tokens:
            tokens = tokens[: self.max_tokens - len(accepted)]
        if chunk.logprobs:
            self.stats.weigh(chunk.logprobs)
        used = writer.write(tokens, chunk.logprobs)
        accepted += tokens[:used] if writer.stopped else tokens
        return writer.stopped

    def accept_last(self, chunk: Chunk) -> bool:
        """Accept the last tokens of an answer. One that is a stop token ends it and is no part of its text."""
        tokens = chunk.tokens[: self.max_tokens - len(self.accepted)]
        hidden = bool(tokens) and tokens[-1] in self.request.sampling.stop_token_ids
        used = self.writer.write(tokens[:-1] if hidden else tokens, chunk.logprobs)
        self.accepted += tokens[:used] if self.writer.stopped else tokens
        return self.writer.stopped

    def accept_text(self, text: str) -> bool:
        """Accept text that came without tokens."""
        self.writer.write_text(text, self.continuation.take_text(text))
        return self.writer.stopped

    def note_cached(self, cached: int) -> None:
        """Remember how many tokens of the prompt the first worker had cached. Raise InvalidOutput."""
        if not 0 <= cached <= self.attempt_tokens:
            raise InvalidOutput("a count of cached tokens that its prompt does not have")
        self.stats.cached_tokens = self.answer.cached_tokens = cached

    def rewind(self, count: int) -> None:
        """Forget all accepted tokens after the first `count`; the client has seen none of these."""
        self.continuation.rewind(count)
        self.stats.counted = min(self.stats.counted, count)  # later tokens are counted again
        self.writer.rewind(count)


class RunningRequests:
    """The requests that were sent to a worker and have not left it. The worker's counters, which the router reads, change with
    them."""

    def __init__(self) -> None:
        self._at: dict[Endpoint, dict[LiveRequest, int]] = {}  # with the tokens that each began with

    def at(self, endpoint: Endpoint) -> Collection[LiveRequest]:
        """Return the requests at a worker, oldest first: a view, while there are any."""
        found = self._at.get(endpoint)
        return found.keys() if found is not None else ()

    def items(self) -> Iterator[tuple[Endpoint, Collection[LiveRequest]]]:
        """Yield each worker with its requests: copies, since requests may leave meanwhile."""
        for endpoint, there in list(self._at.items()):
            yield endpoint, tuple(there)

    def begin(self, live: LiveRequest, endpoint: Endpoint, tokens: int) -> None:
        """Count a request that was sent to a worker. `tokens`: its prompt's, and those that it may generate."""
        endpoint.begin(tokens)
        there = self._at.get(endpoint)
        if there is None:
            there = self._at[endpoint] = {}
        there[live] = tokens

    def end(self, live: LiveRequest, endpoint: Endpoint) -> None:
        """Count that a request has left a worker. Raise KeyError if it was not there."""
        there = self._at[endpoint]
        endpoint.end(there.pop(live))
        if not there:
            del self._at[endpoint]


class WaitingRequests:
    """One frontend's. Whatever yields requests expects that each is dealt with before the next is asked for."""

    def __init__(self) -> None:
        self.parked: dict[LiveRequest, None] = {}  # for a worker to continue with, or until they may be sent
        self.unbegun: dict[LiveRequest, None] = {}  # those that were sent and have no first token
        self._rerouting: dict[LiveRequest, None] = {}

    def park(self, live: LiveRequest, *, keep_room: bool) -> None:
        """Keep a request until a worker may take it; `keep_room`: with the room that it was admitted with."""
        self._rerouting.pop(live, None)
        self.parked[live] = None
        if keep_room:
            live.keep_room()

    def unpark(self, live: LiveRequest) -> None:
        """Take a request out of the parked ones."""
        self.parked.pop(live, None)

    def sent(self, live: LiveRequest) -> None:
        """Wait for the first token of a request."""
        self.unbegun[live] = None

    def started(self, live: LiveRequest) -> None:
        """The first token of a request has come, or none will."""
        self.unbegun.pop(live, None)

    def reroute(self, live: LiveRequest) -> bool:
        """Place a request with all that lost their workers in this turn of the loop. Return whether it is the first of these."""
        first = not self._rerouting
        self._rerouting[live] = None
        return first

    def take_rerouting(self) -> Collection[LiveRequest]:
        """Return those that are to be placed now."""
        waiting, self._rerouting = self._rerouting, {}
        return waiting

    def forget(self, live: LiveRequest) -> None:
        """A request is over."""
        self.parked.pop(live, None)
        self._rerouting.pop(live, None)

    def due(self, now: float) -> Iterator[LiveRequest]:
        """Yield the parked requests that may be sent again."""
        for live in list(self.parked):
            if live in self.parked and now >= live.state.not_before:
                yield live

    def longest(self, model: str, now: float) -> LiveRequest | None:
        """Return the parked request of a model that has waited longest to continue, if it may be sent again."""
        found = [
            one
            for one in self.parked
            if one.request.model == model and one.state.move is not None and now >= one.state.not_before
        ]
        return min(found, key=lambda one: one.state.waits_until) if found else None

    def late(self, now: float, first_token_s: float) -> Iterator[LiveRequest]:
        """Yield the parked requests that have waited too long, and those that may have waited too long for their first token.
        No limit for that is shorter than `first_token_s`."""
        for live in list(self.parked):
            if live in self.parked and now > live.state.waits_until:
                yield live
        young = now - first_token_s
        for live in list(self.unbegun):
            if live in self.unbegun and live.state.began_at < young:
                yield live
