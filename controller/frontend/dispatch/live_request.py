"""A live request: one answer in progress, with all state that the frontend holds for it.

A data record without policy. Only the driver changes `state`, through the request state machine. Components that select requests
(stall watch, preemption, planned moves, placement) read the record.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

import msgspec
from msgspec.structs import replace

from controller.frontend.admission.admission import Reservation
from controller.frontend.health.exposure import ServedSpan, ServedSpans
from controller.frontend.openai.choice import Choice, ResponseWriter
from controller.frontend.openai.completion import Completion
from controller.frontend.openai.text.detokenizer import InvalidOutput
from controller.frontend.openai.text.tokenizer import Tokens
from controller.frontend.request.effects import TransferOver
from controller.frontend.request.events import TransferAdvanced
from controller.frontend.request.failures import Failure, PlannedCause
from controller.frontend.request.state import (
    AnswerProgress,
    Carried,
    GenerationRequest,
    Move,
    RequestState,
    budget_ended,
    stays,
)
from controller.frontend.request_metrics import ModelMetrics
from controller.migration import planned_move as kv
from controller.migration.cost import MigrationCost
from controller.ports import Sink, TransferSink
from controller.router.endpoints import Endpoint, Key
from controller.router.load.active_sequences import ActiveSequences
from events.wire import Chunk, Committed, Generate, Logprob, Reserved

HELD_MAX = 1024  # chunks of the target that are buffered until the source's last tokens arrive
LOGPROB_MAX = 0.01  # tolerance for rounding in engines: a log probability is at most 0
TOP_MAX = 256  # alternatives per position
# probability 1 in 8,000: a correct sampler draws few tokens below this, a broken sampler draws mostly such tokens
LOGPROB_FLOOR = -9.0


@dataclass(eq=False, repr=False, kw_only=True)
class KvMove(TransferSink):
    """The state of one KV transfer in the frontend. `controller.migration.planned_move` decides the order of its steps.

    Until the switch to the target, the target's chunks are buffered in `held`, because the source's last tokens come first. A
    subclass processes the frames of source and target.
    """

    source: Endpoint
    source_stream: int
    base: int  # number of accepted tokens when room at the target was requested
    target: Endpoint
    rank: int  # DP rank at the target
    cause: PlannedCause
    began_at: float
    stream: int = 0  # stream number at the target
    offer: Reserved | None = None
    commit: Committed | None = None
    held: list[Chunk] = field(default_factory=list)
    predicted_ms: float | None = None
    target_failed: bool = False
    cheaper: MigrationCost | None = None  # cost of recomputing at the target, given what it has cached

    def ended(self, over: TransferOver) -> None:
        """Handle the end of the transfer; `over` states its outcome."""
        raise NotImplementedError

    def move(self, tokens: int) -> Move:
        """Return the move to record after the target's commit. `tokens`: number of tokens accepted so far."""
        why, commit = Failure(self.cause, ""), self.commit
        assert commit is not None
        carried = Carried(commit.bytes, commit.blocks, commit.link)
        return Move(why, why, self.source.server, self.began_at, tokens, carried, self.predicted_ms)


class Dispatch(msgspec.Struct, eq=False):
    """One attempt, with the identifiers that components outside the state machine use for it. Immutable."""

    endpoint: Endpoint
    rank: int | None  # if the worker has several DP ranks
    stream: int  # stream number on the request plane
    slot: int  # number in the slot tracker
    routed_under: int  # number of the controller's last decision when the attempt was routed
    breaker_epoch: int  # this frontend's last local breaker move when the attempt was routed
    before: "Dispatch | None"  # the previous attempt
    claimed: int = 0  # prompt tokens that the worker had reported as cached


@dataclass(slots=True, eq=False, repr=False)  # updating a msgspec struct takes twenty times as long
class OutputStats:
    """Token times and counts of one answer, and the spans of tokens that each worker served."""

    metrics: ModelMetrics
    exposures: ServedSpans
    tracker: ActiveSequences | None  # the slot tracker, which also counts tokens
    # accepted tokens up to which the request may move; inf: no limit, or already counted as exceeded
    movable_max: float
    arrived_at: float  # when the request arrived
    attempt_at: float  # when the last attempt was sent
    last_at: float  # time of the last token; before the first token: when the request was due to be sent
    first_at: float | None = None
    cached_tokens: int | None = None  # cached prompt tokens, as reported by the first worker
    counted: int = 0  # accepted tokens at the end of the last turn of the event loop
    weighed: int = 0  # tokens with logprobs
    unlikely: int = 0  # tokens with a logprob below LOGPROB_FLOOR
    own: ServedSpan | None = None  # span of the current worker, from its first token on
    sources: tuple[ServedSpan, ...] = ()  # spans of the workers that computed the transferred KV cache

    def first_output(self, now: float) -> None:
        """Record the time of the answer's first token."""
        self.first_at = now
        self.metrics.ttft.note(now - self.arrived_at)

    def weigh(self, logprobs: Sequence[Logprob]) -> None:
        """Count tokens with logprobs, and how many of these are below LOGPROB_FLOOR."""
        self.weighed += len(logprobs)
        self.unlikely += sum(one.chosen < LOGPROB_FLOOR for one in logprobs)

    def count(self, live: "LiveRequest", now: float) -> None:
        """Count the tokens accepted in this turn of the event loop. All of them come from the current attempt."""
        dispatch, accepted, counted = live.dispatch, len(live.accepted), self.counted
        new = accepted - counted
        if dispatch is not None and accepted > self.movable_max:
            self.note_length(live)
        if not new or dispatch is None:
            return
        metrics, own = self.metrics, self.own
        if own is None:
            request, number, where = live.request, live.answer.number, (dispatch.rank, dispatch.endpoint.key)
            own = self.own = ServedSpan(
                request.id, request.model, counted, number, request.traceparent, *where
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
        """Count a request that has become too long to move, if it was allowed to move until now. Each counts once."""
        if not budget_ended(live.state):
            self.movable_max = inf
            self.metrics.outgrown()

    # --- provenance

    def depends_on(self, key: Key) -> bool:
        """Return whether new tokens are computed from KV cache or tokens of the worker `key`."""
        return any(span.key == key for span in self._open)

    def hand_over(self) -> None:
        """Record that another worker continues with the KV cache of the current one."""
        self.sources, self.own = self._open, None

    def leave(self) -> None:
        """Record that the current attempt has ended: later tokens are computed without its KV cache."""
        for span in self._open:
            self.exposures.close(span)
        self.sources, self.own = (), None

    @property
    def _open(self) -> tuple[ServedSpan, ...]:
        return (*self.sources, self.own) if self.own is not None else self.sources

    def ended(self, live: "LiveRequest", now: float, *, well: bool) -> None:
        """Record the end of the answer. `well`: without an error or cancellation."""
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
    """The accepted output of one answer, from which the request to the next worker is built."""

    _request: GenerationRequest
    accepted: list[int]  # grows with every step
    tokens: Tokens
    texts: list[str] = []  # text from engines that return no tokens, and the text of all output before it
    _worded: int = 0  # number of accepted tokens that `texts` covers

    def request(self, endpoint: Endpoint, rank: int = 0) -> Generate:
        """Return the generation request for this worker and DP rank."""
        asked, made = self._request, len(self.accepted)
        sampling = asked.sampling
        if made:
            left = sampling.max_tokens - made
            floor = max(0, sampling.min_tokens - made)
            sampling = replace(sampling, max_tokens=left, min_tokens=floor, prompt_logprobs=None)
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
        """Accept text that the engine returned without tokens, and return its number of tokens."""
        tokens = self.tokens.encode_next(text)
        self.texts += (self._unworded(), text)
        self.accepted += tokens
        self._worded = len(self.accepted)
        return len(tokens)

    def rewind(self, count: int) -> None:
        """Drop everything after the first `count` tokens."""
        del self.accepted[count:]
        self.texts.clear()
        self._worded = 0

    def _whole(self) -> list[int]:
        """Return the prompt and all accepted tokens.

        Output that an engine returned as text is tokenized again together with the prompt: tokenizers like Llama 2's put a space
        before each piece that they encode separately.
        """
        request = self._request
        if self.texts:
            encode, prompt_text = self.tokens.encode, self._prompt_text()
            for special in (False, True):
                if encode(prompt_text, special=special) == request.prompt:
                    return encode(prompt_text + self._text(), special=special)
        return request.prompt + self.accepted if self.accepted else request.prompt

    def _prompt_text(self) -> str:
        """Return the prompt as text, for engines that accept only text."""
        return self._request.prompt_text or self.tokens.decode(self._request.prompt)

    def _text(self) -> str:
        """Return all accepted output as text, including output that workers returned as tokens."""
        return "".join(self.texts) + self._unworded()

    def _unworded(self) -> str:
        """Return the text of the tokens that `texts` does not cover, decoded in the context of the tokens before them.

        An incomplete last character is omitted: a worker that continues from text returns the whole character.
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
class LiveRequest(Sink):
    """One answer in progress. The driver's subclass processes its worker's frames."""

    answer: Choice
    completion: Completion | None  # notified when the answer ends; None after that
    state: RequestState
    stats: OutputStats
    continuation: Continuation
    request: GenerationRequest = field(init=False)  # the answer's, as the next two: read with every chunk
    writer: ResponseWriter = field(init=False)
    accepted: list[int] = field(init=False)
    max_tokens: int = field(init=False)
    dispatch: Dispatch | None = None  # the current attempt
    last_dispatch: Dispatch | None = None
    kv_move: KvMove | None = None  # a KV transfer in progress
    room: Reservation | None = None  # the released reservation, or (`keeps_room`) the active one
    keeps_room: bool = False
    over: bool = False
    exposure: str = ""  # policy applied when the answer's tokens were last found to be exposed
    # prefill length of the last attempt: prompt tokens and tokens accepted before the attempt
    attempt_tokens: int = 0

    def __post_init__(self) -> None:
        answer = self.answer
        self.request, self.writer, self.accepted = answer.request, answer.writer, answer.accepted
        self.max_tokens = answer.request.sampling.max_tokens

    @property
    def endpoint(self) -> Endpoint | None:
        """The worker of the current attempt."""
        return self.dispatch.endpoint if self.dispatch is not None else None

    @property
    def length(self) -> int:
        """Number of prompt tokens and accepted tokens."""
        return len(self.request.prompt) + len(self.accepted)

    @property
    def progress(self) -> AnswerProgress:
        """The progress of the answer, for the state machine."""
        return AnswerProgress(len(self.accepted), self.writer.reached, bool(self.continuation.texts))

    @property
    def stays(self) -> bool:
        """Whether planned moves are forbidden. Text without tokens forbids them: the next worker would have to tokenize it."""
        return self.over or bool(self.continuation.texts) or stays(self.state.terms, len(self.accepted))

    def begin(self, dispatch: Dispatch, now: float) -> None:
        """Make a new attempt the current one."""
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
        """Return the state machine's event for an event of this request's KV transfer."""
        base = self.kv_move.base if self.kv_move is not None else len(self.accepted)
        return TransferAdvanced(event, tuple(self.accepted[base:]))

    def give_back(self) -> None:
        """Release the room that it kept while it was parked."""
        if self.keeps_room and self.room is not None:
            self.keeps_room = False
            self.room.free()

    def turned_away(self, dispatch: Dispatch) -> None:
        """Discard an attempt that its worker rejected for lack of room."""
        before = self.last_dispatch = dispatch.before
        self.answer.endpoint = None if before is None else before.endpoint

    # --- tokens: a continuation replays the accepted tokens, whether or not the client has read them

    def accept(self, chunk: Chunk) -> bool:
        """Accept and write the tokens of a chunk. Return whether a stop string was reached. Raise InvalidOutput."""
        tokens, writer, accepted = chunk.tokens, self.writer, self.accepted
        if len(accepted) + len(tokens) > self.max_tokens:
            tokens = tokens[: self.max_tokens - len(accepted)]
        if chunk.logprobs:
            self.stats.weigh(chunk.logprobs)
        used = writer.write(tokens, chunk.logprobs)
        accepted += tokens[:used] if writer.stopped else tokens
        return writer.stopped

    def accept_last(self, chunk: Chunk) -> bool:
        """Accept the last tokens of an answer. A final stop token is accepted, but not written as text."""
        tokens = chunk.tokens[: self.max_tokens - len(self.accepted)]
        hidden = bool(tokens) and tokens[-1] in self.request.sampling.stop_token_ids
        used = self.writer.write(tokens[:-1] if hidden else tokens, chunk.logprobs)
        self.accepted += tokens[:used] if self.writer.stopped else tokens
        return self.writer.stopped

    def accept_text(self, text: str) -> bool:
        """Accept text that the engine returned without tokens. Return whether a stop string was reached."""
        self.writer.write_text(text, self.continuation.take_text(text))
        return self.writer.stopped

    def note_cached(self, cached: int) -> None:
        """Record the number of prompt tokens that the first worker had cached. Raise InvalidOutput if it is impossible."""
        if not 0 <= cached <= self.attempt_tokens:
            raise InvalidOutput("a number of cached tokens that exceeds its prompt")
        self.stats.cached_tokens = self.answer.cached_tokens = cached

    def rewind(self, count: int) -> None:
        """Drop all accepted tokens after the first `count`; the client has received none of the dropped ones."""
        self.continuation.rewind(count)
        self.stats.counted = min(self.stats.counted, count)  # later tokens are counted again
        self.writer.rewind(count)


class RunningRequests:
    """The requests that run on each worker. Adding or removing one also updates the endpoint's counters for the router."""

    def __init__(self) -> None:
        self._at: dict[Endpoint, dict[LiveRequest, int]] = {}  # with the token count passed to `begin`

    def at(self, endpoint: Endpoint) -> Collection[LiveRequest]:
        """Return the requests on a worker, oldest first. The result is a live view unless it is empty."""
        found = self._at.get(endpoint)
        return found.keys() if found is not None else ()

    def items(self) -> Iterator[tuple[Endpoint, Collection[LiveRequest]]]:
        """Yield each worker with a copy of its requests, because requests may leave during the iteration."""
        for endpoint, there in list(self._at.items()):
            yield endpoint, tuple(there)

    def begin(self, live: LiveRequest, endpoint: Endpoint, tokens: int) -> None:
        """Add a request that was sent to a worker. `tokens`: number of prompt tokens plus the maximum of generated tokens."""
        endpoint.begin(tokens)
        self._at.setdefault(endpoint, {})[live] = tokens

    def end(self, live: LiveRequest, endpoint: Endpoint) -> None:
        """Remove a request that has left a worker. Raise KeyError if it was not running there."""
        there = self._at[endpoint]
        endpoint.end(there.pop(live))
        if not there:
            del self._at[endpoint]


class WaitingRequests:
    """The waiting requests of one frontend. A consumer of an iterator must handle each request before it advances."""

    def __init__(self) -> None:
        # requests that wait for a worker, or for the time at which they may be sent
        self.parked: dict[LiveRequest, None] = {}
        self.unbegun: dict[LiveRequest, None] = {}  # requests that were sent and have no first token yet
        self._rerouting: dict[LiveRequest, None] = {}

    def park(self, live: LiveRequest, *, keep_room: bool) -> None:
        """Park a request until a worker may accept it. `keep_room`: reserve the room from its admission again."""
        self._rerouting.pop(live, None)
        self.parked[live] = None
        if keep_room and live.room is not None:
            live.room, live.keeps_room = live.room.again(), True

    def reroute(self, live: LiveRequest) -> bool:
        """Queue a request for joint placement with all that lost their workers in this turn of the event loop.

        Return whether it is the first in the queue.
        """
        first = not self._rerouting
        self._rerouting[live] = None
        return first

    def take_rerouting(self) -> Collection[LiveRequest]:
        """Return the requests queued for joint placement, and empty the queue."""
        waiting, self._rerouting = self._rerouting, {}
        return waiting

    def forget(self, live: LiveRequest) -> None:
        """Remove a request that has ended."""
        self.parked.pop(live, None)
        self._rerouting.pop(live, None)

    def due(self, now: float) -> Iterator[LiveRequest]:
        """Yield the parked requests that may be sent again."""
        for live in list(self.parked):
            if live in self.parked and now >= live.state.not_before:
                yield live

    def longest(self, model: str, now: float) -> LiveRequest | None:
        """Return the migrating request of a model that has been parked longest, of those that may be sent again now."""
        found = [
            one
            for one in self.parked
            if one.request.model == model and one.state.move is not None and now >= one.state.not_before
        ]
        return min(found, key=lambda one: one.state.waits_until) if found else None

    def late(self, now: float, first_token_s: float) -> Iterator[LiveRequest]:
        """Yield parked requests that have waited too long, and requests that may have exceeded their first-token limit.

        `first_token_s` is the shortest first-token limit of any model: the caller checks the exact limit.
        """
        for live in list(self.parked):
            if live in self.parked and now > live.state.waits_until:
                yield live
        young = now - first_token_s
        for live in list(self.unbegun):
            if live in self.unbegun and live.state.began_at < young:
                yield live


def check_logprobs(logprobs: Sequence[Logprob], vocabulary: int) -> None:
    """Validate the logprobs of a chunk. Token ids must be below `vocabulary`. Raise InvalidOutput.

    A logprob that is not a number or is above 0 counts as the worker's fault. `openai.text.detokenizer` validates the tokens.
    """
    for one in logprobs:
        if not (isfinite(one.chosen) and one.chosen <= LOGPROB_MAX) or len(one.top) > TOP_MAX:
            raise InvalidOutput("a logprob that is not a number, or above 0")
        for token, logprob in one.top:
            if not 0 <= token < vocabulary:
                raise InvalidOutput("an alternative outside the vocabulary")
            if logprob != logprob or logprob > LOGPROB_MAX:  # -inf means that the token cannot be drawn
                raise InvalidOutput("a logprob that is not a number, or above 0")
