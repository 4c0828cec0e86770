"""A live request: one answer in progress, with all state that the frontend holds for it.

A live request holds data and makes no decisions. Only the driver changes `state`, through the request state machine.
The components that select requests (stall watch, preemption, planned moves, placement) read the data.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec
from msgspec.structs import replace

from controller.frontend.admission.admission import Reservation
from controller.frontend.health.exposure import ServedSpan, ServedSpans
from controller.frontend.openai.choice import Choice, InvalidOutput, ResponseWriter
from controller.frontend.openai.completion import Completion
from controller.frontend.openai.text.tokenizer import Tokens
from controller.frontend.request.answer_grammar import AnswerGrammar
from controller.frontend.request.effects import TransferOver
from controller.frontend.request.events import TransferAdvanced
from controller.frontend.request.failures import Failure, PlannedCause
from controller.frontend.request.state import (
    AnswerProgress,
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
from events.grammar.refusals import GrammarRefused, TextRejected
from events.wire import Chunk, Committed, Generate, Logprob, Reserved

# largest number of target chunks buffered during a KV transfer, until the source's last tokens arrive
HELD_MAX = 1024
# natural log of 1/8,000; a correct sampler draws few tokens below this probability, a broken one mostly such tokens
LOGPROB_FLOOR = -9.0


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MigrationRequest:
    """One request that a planned move must take to another worker."""

    live: "LiveRequest"
    source: Endpoint
    cause: PlannedCause
    to: str = ""  # the only worker to which the request may move; empty if any may take it
    planned: str = ""  # target of this request in the plan of its group; empty if there is no such plan
    without: frozenset[str] = frozenset()  # targets that refused the request, or failed
    why: str = ""  # reason of the first refusal

    @property
    def stale(self) -> bool:
        """Whether the request has ended or has left its source."""
        return self.live.over or self.live.endpoint is not self.source

    @property
    def ready(self) -> bool:
        """Whether the request can move now, because it produces tokens and no transfer of it is under way."""
        return self.live.state.has_output and self.live.state.transfer is None


@dataclass(eq=False, repr=False, kw_only=True)
class KvMove(TransferSink):
    """One KV transfer of a running answer from a source to a target worker, as the frontend tracks it.

    `controller.migration.planned_move` decides the order of the steps. Until the switch to the target, the target's
    chunks are buffered in `held`, because the source's last tokens must be written to the response first. A
    subclass processes the frames of source and target.
    """

    wanted: MigrationRequest
    source_stream: int
    base: int  # number of accepted tokens when room at the target was requested
    target: Endpoint
    rank: int  # DP rank at the target
    began_at: float
    stream: int = 0  # stream number at the target
    offer: Reserved | None = None
    commit: Committed | None = None
    held: list[Chunk] = field(default_factory=list)
    predicted_ms: float | None = None
    target_failed: bool = False
    # cost of recomputing the cache at the target, given the blocks that the target has cached
    cheaper: MigrationCost | None = None

    def ended(self, over: TransferOver) -> None:
        """Handle the end of the transfer. `over` contains the outcome."""
        raise NotImplementedError

    def move(self, tokens: int) -> Move:
        """Return the record of this migration. Called once the target has committed.

        `tokens` is the number of tokens accepted so far.
        """
        assert self.commit is not None  # without one, the record would say that the cache was recomputed
        why, source = Failure(self.wanted.cause, ""), self.wanted.source.server
        return Move(why, why, source, self.began_at, tokens, self.commit, self.predicted_ms)


class Dispatch(msgspec.Struct, eq=False):
    """One attempt (one sending of a request to a worker), with its ids in other components. Immutable.

    The ids are those in the request plane, the slot tracker and the breakers.
    """

    endpoint: Endpoint
    rank: int | None  # DP rank, or None if the worker has only one
    stream: int  # stream number on the request plane
    slot: int  # number in the slot tracker
    routed_under: int  # number of the controller's last decision when the attempt was routed
    breaker_epoch: int  # number of this frontend's last local breaker move when the attempt was routed
    before: Endpoint | None  # the worker of the previous attempt
    claimed: int = 0  # prompt tokens that KV events reported as cached at the worker


# a dataclass, because updating a msgspec struct takes twenty times as long
@dataclass(slots=True, eq=False, repr=False)
class OutputStats:
    """Measures one answer: its token times and counts, and the span of tokens that each worker served."""

    metrics: ModelMetrics
    exposures: ServedSpans
    tracker: ActiveSequences | None  # the slot tracker, which also counts tokens
    # longest output in tokens with which the request may move; inf if there is no limit, or if the excess was counted
    movable_max: float
    arrived_at: float  # when the request arrived
    attempt_at: float  # when the last attempt was sent
    last_at: float  # time of the last token; before the first token: when the request was due to be sent
    first_at: float | None = None
    counted: int = 0  # number of accepted tokens at the end of the last event-loop iteration that had output
    weighed: int = 0  # tokens with logprobs
    unlikely: int = 0  # tokens with a logprob below LOGPROB_FLOOR
    own: ServedSpan | None = None  # span of the current worker, from its first token on
    sources: tuple[ServedSpan, ...] = ()  # spans of the workers that computed the transferred KV cache

    def first_output(self, now: float) -> None:
        """Record that the answer has its first token, and how long the client waited for this token."""
        self.first_at = now
        self.metrics.ttft.note(now - self.arrived_at)

    def weigh(self, logprobs: Sequence[Logprob]) -> None:
        """Update two counts: all tokens with logprobs, and the unlikely tokens (with a logprob below LOGPROB_FLOOR)."""
        self.weighed += len(logprobs)
        self.unlikely += sum(one.chosen < LOGPROB_FLOOR for one in logprobs)

    def count(self, live: "LiveRequest", now: float) -> None:
        """Count the tokens accepted in this event-loop iteration, all of which come from the current attempt."""
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
        """Count a request that has become too long to move to another worker.

        Each request counts once. A request that is forbidden to move for another reason does not count.
        """
        if not budget_ended(live.state):
            self.movable_max = inf
            self.metrics.outgrown()

    # --- provenance

    def depends_on(self, key: Key) -> bool:
        """Return whether new tokens are computed from KV cache that the worker `key` has generated or sent."""
        return any(span.key == key for span in self._open)

    def hand_over(self) -> None:
        """Record that another worker continues the answer with the KV cache of the current worker."""
        self.sources, self.own = self._open, None

    def leave(self) -> None:
        """Record that the current attempt has ended. Later tokens do not depend on the attempt's KV cache."""
        for span in self._open:
            self.exposures.close(span)
        self.sources, self.own = (), None

    @property
    def _open(self) -> tuple[ServedSpan, ...]:
        return (*self.sources, self.own) if self.own is not None else self.sources

    def ended(self, live: "LiveRequest", now: float, *, well: bool) -> None:
        """Record the end of the answer. `well` states that the answer ended without an error or cancellation."""
        accepted, metrics, arrived_at = len(live.accepted), self.metrics, self.arrived_at
        metrics.ended(now - arrived_at, accepted, live.answer.cached_tokens)
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
    tokens: Tokens  # the tokenizer
    # text pieces from engines that return no tokens, each preceded by the text of the output before it
    texts: list[str] = []
    _worded: int = 0  # number of accepted tokens that `texts` covers

    def request(self, endpoint: Endpoint, rank: int = 0) -> Generate:
        """Return the request for the next worker and DP rank: the prompt, followed by the accepted tokens.

        The accepted tokens reduce the number of tokens left to generate.
        """
        asked, sampling, made = self._request, self._request.sampling, len(self.accepted)
        if asked.proxied is not None:
            return asked.passed_on(rank)
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
            guided=asked.guided
            if asked.grammar is None
            else {"structured_outputs": {"grammar": self._rest(asked.grammar)}},
            guided_fallback=None if made or asked.grammar is None else asked.guided,
            prompt_text=self._prompt_text() + self._text() if endpoint.joined.engine == "openai" else "",
            traceparent=asked.traceparent,
            cache_salt=asked.cache_salt,
            rank=rank,
            cache_epoch=endpoint.cache_epoch,
            priority=asked.priority,
            adapter=asked.adapter,
        )

    def _rest(self, grammar: AnswerGrammar) -> str:
        """Return the grammar of what may follow the accepted text.

        Raise TextRejected or GrammarRefused if there is no such grammar.
        """
        if self.texts:
            return grammar.rest(self._text())
        return grammar.rest(self.tokens.answer_text(self._request.prompt, self.accepted))

    def stuck(self, reached: int) -> str:
        """Return why no other worker can continue the answer; empty if one can.

        Only an answer with a grammar and accepted tokens can be stuck, for one of two reasons:

        1. Another worker can only continue after the last whole character. But the client may have received the first
           `reached` tokens, and these include a part of the next character.
        2. The grammar of what may follow the accepted text cannot be computed. The original constraint is not sent
           instead, because a server that supports no grammars may interpret the constraint differently.
        """
        grammar, accepted = self._request.grammar, self.accepted
        if grammar is None or not accepted:
            return ""
        try:
            self._rest(grammar)
        except (TextRejected, GrammarRefused):
            return "guided_decoding"
        return "guided_decoding" if self.whole < reached else ""

    @property
    def whole(self) -> int:
        """Number of accepted tokens, without those of an incomplete last character."""
        return len(self.accepted) if self.texts else self.tokens.whole_characters(self.accepted)

    def take_text(self, text: str) -> int:
        """Accept text that an engine returned without tokens. Return the number of tokens in the text."""
        tokens = self.tokens.encode_next(text)
        self.texts += (self._unworded(), text)
        self.accepted += tokens
        self._worded = len(self.accepted)
        return len(tokens)

    def rewind(self, count: int) -> None:
        """Drop all output after the first `count` tokens."""
        del self.accepted[count:]
        self.texts.clear()
        self._worded = 0

    def _whole(self) -> list[int]:
        """Return the prompt followed by all accepted tokens.

        Output that an engine returned as text is tokenized again together with the prompt, because tokenizers like
        Llama 2's put a space before each separately encoded piece.
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
        """Return all accepted output as text, including the part that workers returned as tokens."""
        return "".join(self.texts) + self._unworded()

    def _unworded(self) -> str:
        """Return the text of the accepted tokens that `texts` does not cover yet.

        The tokens are decoded in the context of the tokens before. An incomplete last character is omitted,
        because a worker that continues from text generates the whole character.
        """
        accepted, worded = self.accepted, self._worded
        if worded == len(accepted):
            return ""
        decode, prompt = self.tokens.decode, self._request.prompt
        before, whole = decode(prompt + accepted[:worded]), decode(prompt + accepted)
        if not whole.startswith(before):
            before, whole = "", decode(accepted[worded:])
        return whole[len(before) :].rstrip("\ufffd")


@dataclass(slots=True, eq=False, repr=False)  # a dataclass for the same reason as `OutputStats`
class LiveRequest(Sink):
    """One answer in progress. A subclass in the driver processes the frames of the answer's worker."""

    answer: Choice
    completion: Completion | None  # notified when the answer ends, and None afterwards
    state: RequestState
    stats: OutputStats
    continuation: Continuation
    # this field and the next three are copies of the answer's, because they are read with every chunk
    request: GenerationRequest = field(init=False)
    writer: ResponseWriter = field(init=False)
    accepted: list[int] = field(init=False)
    max_tokens: int = field(init=False)
    dispatch: Dispatch | None = None  # the current attempt
    kv_move: KvMove | None = None  # a KV transfer in progress
    # the reservation of its admission, released once the request is sent; active while `keeps_room` is true
    room: Reservation | None = None
    keeps_room: bool = False
    over: bool = False  # the answer has ended
    # corruption policy that was applied when the answer's tokens were last found to be exposed
    exposure: str = ""
    # prefill length of the last attempt in tokens: the prompt, and the tokens accepted before the attempt
    attempt_tokens: int = 0

    def __post_init__(self) -> None:
        answer = self.answer
        self.request, self.writer, self.accepted = answer.request, answer.writer, answer.accepted
        self.max_tokens = answer.request.sampling.max_tokens

    @property
    def endpoint(self) -> Endpoint | None:
        """The worker of the current attempt, or None if no attempt runs."""
        return self.dispatch.endpoint if self.dispatch is not None else None

    @property
    def length(self) -> int:
        """Number of prompt tokens plus accepted tokens."""
        return len(self.request.prompt) + len(self.accepted)

    @property
    def progress(self) -> AnswerProgress:
        """The answer's accepted tokens, written tokens and kind of output, as the state machine needs them."""
        reached, texts = self.writer.reached, bool(self.continuation.texts)
        return AnswerProgress(len(self.accepted), reached, texts, self.continuation.stuck(reached))

    @property
    def stays(self) -> bool:
        """Whether planned moves are forbidden for this answer.

        They are forbidden if the answer has ended, or if the terms of the request forbid them. They are also forbidden
        if a worker returned text instead of token ids. Another worker would have to tokenize that text, which may give
        other tokens.
        """
        if self.over or self.continuation.texts or stays(self.state.terms, len(self.accepted)):
            return True
        return bool(self.continuation.stuck(self.writer.reached))

    def begin(self, dispatch: Dispatch, now: float) -> None:
        """Make a new attempt the current attempt of this request."""
        accepted = len(self.accepted)
        self.dispatch = dispatch
        self.room = None
        self.answer.endpoint = dispatch.endpoint
        if dispatch.before is not None:
            self.stats.attempt_at = now
        self.attempt_tokens = len(self.request.prompt) + accepted
        if accepted > self.stats.movable_max:
            self.stats.note_length(self)

    def advanced(self, event: kv.Event) -> TransferAdvanced:
        """Convert an event of this request's KV transfer to an event for the state machine."""
        base = self.kv_move.base if self.kv_move is not None else len(self.accepted)
        return TransferAdvanced(event, tuple(self.accepted[base:]))

    def give_back(self) -> None:
        """Release the room that the request has kept while it was parked."""
        if self.keeps_room and self.room is not None:
            self.keeps_room = False
            self.room.free()

    # --- tokens: accepted tokens are sent again to the next worker, whether or not the client has read them

    def accept(self, chunk: Chunk) -> bool:
        """Accept the tokens of a chunk and write them to the response. Return whether a stop string was reached.

        Raise InvalidOutput if the response writer finds an invalid token.
        """
        tokens, writer, accepted = chunk.tokens, self.writer, self.accepted
        if len(accepted) + len(tokens) > self.max_tokens:
            tokens = tokens[: self.max_tokens - len(accepted)]
        if chunk.logprobs:
            self.stats.weigh(chunk.logprobs)
        used = writer.write(tokens, chunk.logprobs)
        accepted += tokens[:used] if writer.stopped else tokens
        return writer.stopped

    def accept_last(self, chunk: Chunk) -> bool:
        """Accept the last tokens of an answer. Return whether a stop string was reached.

        A final stop token is accepted, but not written to the response.
        """
        tokens = chunk.tokens[: self.max_tokens - len(self.accepted)]
        hidden = bool(tokens) and tokens[-1] in self.request.sampling.stop_token_ids
        if hidden:
            self.writer.end_at(tokens[-1])
        used = self.writer.write(tokens[:-1] if hidden else tokens, chunk.logprobs)
        self.accepted += tokens[:used] if self.writer.stopped else tokens
        return self.writer.stopped

    def accept_text(self, text: str) -> bool:
        """Accept text that the engine returned without tokens. Return whether a stop string was reached."""
        self.writer.write_text(text, self.continuation.take_text(text))
        return self.writer.stopped

    def note_cached(self, cached: int) -> None:
        """Record how many prompt tokens were cached, as reported by the first worker that reports this number.

        Raise InvalidOutput if the number is negative, or exceeds the number of tokens that were sent to the worker.
        """
        if not 0 <= cached <= self.attempt_tokens:
            raise InvalidOutput("a number of cached tokens that exceeds its prompt")
        self.answer.cached_tokens = cached

    def drop_unfinished(self) -> None:
        """Drop the last tokens of a constrained answer if they are only a part of a character.

        No grammar begins inside a character. The client has not received these tokens (see `Continuation.stuck`).
        """
        if self.request.grammar is not None and (whole := self.continuation.whole) < len(self.accepted):
            self.rewind(whole)

    def rewind(self, count: int) -> None:
        """Drop all accepted tokens after the first `count`. The client must not have received any of the dropped tokens."""
        self.continuation.rewind(count)
        self.stats.counted = min(self.stats.counted, count)  # later tokens are counted again
        self.writer.rewind(count)


class RunningRequests:
    """The running requests by worker.

    Adding or removing a request also updates the endpoint's counters, which the router reads.
    """

    def __init__(self) -> None:
        # for each request the token count that was passed to `begin`
        self._at: dict[Endpoint, dict[LiveRequest, int]] = {}

    def at(self, endpoint: Endpoint) -> Collection[LiveRequest]:
        """Return the requests that run on a worker, oldest first.

        A non-empty result is a view, which changes when requests begin or end.
        """
        found = self._at.get(endpoint)
        return found.keys() if found is not None else ()

    def items(self) -> Iterator[tuple[Endpoint, Collection[LiveRequest]]]:
        """Yield each worker with a copy of its requests, because requests may end during the iteration."""
        for endpoint, there in list(self._at.items()):
            yield endpoint, tuple(there)

    def begin(self, live: LiveRequest, endpoint: Endpoint, tokens: int) -> None:
        """Add a request that was sent to a worker.

        `tokens` is the number of prompt tokens plus the maximum number of generated tokens.
        """
        endpoint.begin(tokens)
        self._at.setdefault(endpoint, {})[live] = tokens

    def end(self, live: LiveRequest, endpoint: Endpoint) -> None:
        """Remove a request that no longer runs on this worker. Raise KeyError if the request did not run there."""
        there = self._at[endpoint]
        endpoint.end(there.pop(live))
        if not there:
            del self._at[endpoint]


class WaitingRequests:
    """The requests of one frontend that wait for a worker or for their first token.

    A caller that iterates over a result must handle each request before it advances the iterator.
    """

    def __init__(self) -> None:
        # requests that wait for a worker, or until the time at which they may be sent
        self.parked: dict[LiveRequest, None] = {}
        self.unbegun: dict[LiveRequest, None] = {}  # requests that were sent and have no first token yet
        # requests that wait for joint placement at the end of this event-loop iteration
        self._rerouting: dict[LiveRequest, None] = {}

    def park(self, live: LiveRequest, *, keep_room: bool) -> None:
        """Park a request until a worker may accept it.

        If `keep_room` is true, the room that was reserved at admission is reserved again.
        """
        self._rerouting.pop(live, None)
        self.parked[live] = None
        if keep_room and live.room is not None:
            live.room, live.keeps_room = live.room.again(), True

    def reroute(self, live: LiveRequest) -> bool:
        """Queue a request for joint placement with all requests that lost their workers in this event-loop iteration.

        Return whether the queue was empty before. In that case, the caller must schedule the placement.
        """
        first = not self._rerouting
        self._rerouting[live] = None
        return first

    def take_rerouting(self) -> Collection[LiveRequest]:
        """Return the requests that wait for joint placement, and clear the list."""
        waiting, self._rerouting = self._rerouting, {}
        return waiting

    def forget(self, live: LiveRequest) -> None:
        """Remove a request that has ended."""
        self.parked.pop(live, None)
        self._rerouting.pop(live, None)

    def due(self, now: float) -> Iterator[LiveRequest]:
        """Return an iterator over the parked requests that have reached their earliest time to be sent again."""
        return (live for live in _each(self.parked) if now >= live.state.not_before)

    def longest(self, model: str, now: float) -> LiveRequest | None:
        """Return the model's parked request that has waited longest, among those that may be sent again now.

        Only requests that have lost a worker are considered. Return None if there is none.
        """
        found = [
            one
            for one in self.parked
            if one.request.model == model and one.state.move is not None and now >= one.state.not_before
        ]
        return min(found, key=lambda one: one.state.waits_until) if found else None

    def late(self, now: float, first_token_s: float) -> Iterator[LiveRequest]:
        """Yield the requests that have waited too long for a worker, or perhaps too long for their first token.

        A parked request is yielded when its time limit has passed. A sent request is yielded when it has had no first
        token for `first_token_s`, the shortest first-token limit of any model in seconds. The caller must then check
        the limit of the request's own model.
        """
        yield from (live for live in _each(self.parked) if now > live.state.waits_until)
        young = now - first_token_s
        yield from (live for live in _each(self.unbegun) if live.state.began_at < young)


def _each(waiting: Mapping[LiveRequest, None]) -> Iterator[LiveRequest]:
    """Yield the requests in `waiting`, without those that are removed before the iteration reaches them."""
    return (live for live in list(waiting) if live in waiting)
