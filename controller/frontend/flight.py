"""A request in the air: one answer, from its first attempt to its end, over any number of workers.

    launch ─▶ flying ── tokens ──▶ landed (finish)
                │  ▲
      failure   │  │ another worker goes on from every token that was accepted
                ▼  │
              moving ── nobody there: parked, for a while ── budget ended ──▶ abandoned (the original error)

Called by the request plane synchronously, token by token; it never waits. What one would get wrong: the log
of accepted tokens is what is replayed, not what the client has read; and an attempt that has been left is
cancelled at the plane, so that nothing late of it can come in.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import structlog

from controller.frontend.choosing import explained
from controller.frontend.continuation import Continuation
from controller.frontend.crossing import Crossing
from controller.frontend.errors import ApiError, internal
from controller.frontend.feeding import Feeding
from controller.frontend.migration import Allowance, Failure, classify
from controller.frontend.passage import Passage
from controller.frontend.plan import Move, Plan
from controller.frontend.voice import Voice
from controller.ports import LostCause, WorkerUnreachable
from controller.router.modes import Choice
from controller.router.pick import AllBusy, AllTried, NoWorker
from controller.router.table import Key, Seat
from events.wire import Chunk, Why

if TYPE_CHECKING:
    from controller.frontend.desk import Desk

PAUSE_S = 0.1  # before the third attempt and later ones, where connections broke

log = structlog.get_logger(__name__)


class Flight:
    """One answer in the air. Implements `controller.ports.Sink`."""

    __slots__ = (
        "_counted", "_desk", "_ended", "_feeding", "_grows", "_max", "_outgrown", "_paid", "_plain",
        "accepted", "allowance", "attempts", "began_at", "cached_tokens", "continuation", "crossing", "done",
        "error", "explained", "finish", "first_at", "first_seat", "last_at", "last_seat", "meter", "not_before",
        "passage", "plan", "rank", "refused", "seat", "sent", "slot", "stream", "under", "voice"
    )  # fmt: skip

    def __init__(
        self, desk: "Desk", plan: Plan, voice: Voice, allowance: Allowance, ended: Callable[["Flight"], None]
    ) -> None:
        self._desk = desk
        self.meter = desk.meter.of(plan.model)
        self._ended = ended
        self.passage: Passage | None = None  # from its first failure or move on
        self._feeding = Feeding(desk.exposures, plan, self)
        self._outgrown = allowance.max_seq_len is None  # too long to move, and counted; or never too long
        self._max = plan.sampling.max_tokens
        self._grows = desk.settings.router.track_output_blocks  # and the router wants to know it
        self._plain = False  # this attempt's first token has come
        self._paid = False  # this attempt has cost budget
        self._counted = 0  # accepted tokens when the last turn ended
        self.plan = plan
        self.voice = voice
        self.allowance = allowance
        self.accepted: list[int] = []
        self.continuation = Continuation(plan, self.accepted, desk.tokens_of(plan.lineage))
        self.seat: Seat | None = None
        self.first_seat: Seat | None = None
        self.last_seat: Seat | None = None
        self.crossing: Crossing | None = None  # its KV cache is on its way elsewhere
        self.refused = ""  # why the last transfer that was wanted did not come off
        self.attempts = 0
        self.stream = 0
        self.slot = 0  # its number at the slot tracker, while it is with a worker
        self.rank: int | None = None  # the one of several DP ranks that it is with
        self.explained: dict[str, Any] | None = None  # why its first worker was chosen, if that was asked
        self.under = 0  # the last decision when this attempt was routed
        self.sent = 0  # the last move of our own breakers then
        self.began_at = desk.now()
        self.first_at: float | None = None
        self.last_at = self.began_at
        self.cached_tokens: int | None = None
        self.not_before = 0.0  # when it may be sent again, while it is parked
        self.finish: str | None = None
        self.error: ApiError | None = None
        self.done = False

    # --- sending it off -----------------------------------------------------------------------------------

    def launch(self, planned: Seat | None = None, *, free: bool = False) -> None:
        """Send the request to the best worker, or where it was planned to go (for a `free` wish of ours: without cost); a
        connection that cannot be made costs no budget."""
        desk = self._desk
        missed: set[Key] = set()
        while not self.done:
            try:
                choice, planned = self._choice(missed, planned), None
            except NoWorker as error:
                self._nowhere(error)
                return
            seat = choice.seat
            rank = choice.holder.rank
            request = self.continuation.request(seat, rank)
            try:
                stream = desk.plane.open(seat.worker, seat.instance, request, self)
            except WorkerUnreachable:
                missed.add(seat.key)
                self.allowance.tried |= {seat.key}
                self._way.interrupted(begun=False)
                free = False
                continue
            if self.plan.wishes.explain and not self.attempts:
                self.explained = explained(choice)
            slot = desk.routing.choosing.begin(choice, self.plan, self.accepted)
            self._board(seat, rank, stream, slot, paid=not free)
            return

    def _board(self, seat: Seat, rank: int, stream: int, slot: int, *, paid: bool) -> None:
        """An attempt begins at this worker's rank, and is counted there under this number."""
        self.attempts += 1
        self.allowance.spent += paid
        self._paid = paid
        self.seat, self.stream, self.slot, self.under = seat, stream, slot, self._desk.table.number
        self.rank = rank if seat.ranks > 1 else None
        self._plain = False
        self.refused = ""
        self.last_seat = seat
        self.first_seat = self.first_seat or seat
        self._desk.boarded(self, seat)
        if not self._outgrown:
            self._measure()

    def _choice(self, missed: set[Key], planned: Seat | None) -> Choice:
        """Return where it was planned to go, or the best worker that has not been tried; if there is none, one to which only
        the connection had failed. Raise NoWorker."""
        allowance, routing, said = self.allowance, self._desk.routing, self.accepted
        if planned is not None:
            return routing.at(planned, self.plan, said)
        try:
            try:
                return routing.route(self.plan, allowance.tried, said, capped=not self.attempts)
            except AllBusy:
                if self.attempts:
                    raise
                # it was let in: one answer of several may find no room any more
                return routing.route(self.plan, allowance.tried, said)
        except AllTried:
            return routing.route(self.plan, allowance.failed | missed, said)

    def _nowhere(self, error: NoWorker) -> None:
        """Nobody can take it now. A request that had begun waits for a worker; a new one is told."""
        move = self._move
        if move is None:
            self._abort(self._desk.no_worker(error, self))
        elif move.failure.kind.patient or error.code != AllTried.code or self.allowance.may_return:
            self._desk.park(self)
        else:
            self._abandon(error.code, move.original)

    # --- what the plane says ------------------------------------------------------------------------------

    def take(self, chunk: Chunk) -> None:
        """Take one step's output for this stream. Whatever goes wrong with it is nobody else's trouble."""
        if self.done:
            return
        try:
            if self._plain and chunk.tokens and chunk.finish is None and chunk.error is None:
                self._go_on(chunk)  # nearly always
                return
            if chunk.tokens:
                self._accept(chunk)
            elif chunk.text is not None:
                self._accept_text(chunk.text)
            if self.finish is not None or self.error is not None:
                return  # a stop string ended it meanwhile
            if chunk.error is not None:
                self._told(chunk.error)
            elif chunk.finish is not None:
                self._land(chunk.finish)
        except Exception:
            self._mistaken()

    def flush(self) -> None:
        """A turn of the loop is over: count and write what it brought."""
        if self.done:
            return  # it was written as the answer ended
        self._account()
        self.voice.flush()
        if self.crossing is not None:
            self.crossing.said()

    def _account(self) -> None:
        """Count the tokens of this turn, and note from whom they came."""
        counted = self._counted
        new = len(self.accepted) - counted
        if not new:
            return
        now, meter = self._desk.now(), self.meter
        feeding, seat = self._feeding, self.seat
        assert seat is not None
        stint = feeding.own or feeding.begin(seat.key, self.rank, counted)
        stint.add(now, new)
        for source in feeding.sources:
            source.add(now, new)
        if self._grows:
            self._desk.routing.choosing.said(self.slot, new)
        meter.tokens += new
        if counted:
            meter.itl.add((now - self.last_at) / new, new)
        self._counted = counted + new
        self.last_at = now
        if not self._outgrown:
            self._measure()

    def _measure(self) -> None:
        """See whether the request has become too long to move. Counted once, and only if it could have moved before."""
        if self._outgrown or self.allowance.ended:
            return
        if self.allowance.over_cap(self._length()):
            self._outgrown = True
            self._desk.meter.outgrown(self.plan.model)

    def lost(self, cause: LostCause, detail: str) -> None:
        """The connection broke, or the worker hangs. Others are told of it after this stream, whatever goes wrong here."""
        if self.done or self.seat is None:
            return
        failure, seat, under, sent = Failure(cause, detail), self.seat, self.under, self.sent
        try:
            if self.crossing is not None and self.crossing.source_lost():
                self._desk.blame(seat, failure, under, sent)
            else:
                self._failed(failure)
        except Exception:
            self._mistaken()

    def _go_on(self, chunk: Chunk) -> None:
        """Take tokens as they are: nearly all of them are from the middle of an answer."""
        tokens, voice = chunk.tokens, self.voice
        if len(self.accepted) + len(tokens) > self._max:
            tokens = tokens[: self._max - len(self.accepted)]
        used = voice.say(tokens, chunk.logprobs)
        if voice.stopped:
            self.accepted += tokens[:used]
            self._stop(chunk)
        else:
            self.accepted += tokens

    def _accept(self, chunk: Chunk) -> None:
        """Take tokens from the beginning or the end of an attempt."""
        if chunk.cached_tokens is not None and self.cached_tokens is None:
            self.cached_tokens = chunk.cached_tokens
        if not self._plain:
            self._heard()
        if chunk.finish == "stop":
            self._accept_last(chunk)
        else:
            self._go_on(chunk)

    def _accept_last(self, chunk: Chunk) -> None:
        """Take tokens of which the last one may be a stop token: it ends the answer and is no part of its text."""
        tokens = chunk.tokens[: self._max - len(self.accepted)]
        hidden = bool(tokens) and tokens[-1] in self.plan.sampling.stop_token_ids
        used = self.voice.say(tokens[:-1] if hidden else tokens, chunk.logprobs)
        if self.voice.stopped:
            self.accepted += tokens[:used]
            self._stop(chunk)
        else:
            self.accepted += tokens

    def _accept_text(self, text: str) -> None:
        if not self._plain:
            self._heard()
        self.voice.say_text(text, self.continuation.take_text(text))
        if self.voice.stopped:
            self._stop(None)

    def _heard(self) -> None:
        """The first came from this attempt: perhaps the first of the answer, or the first after a move."""
        self._plain = True
        self._desk.routing.choosing.read(self.slot)
        if self.first_at is None:
            self.first_at = self._desk.now()
            self.meter.ttft.note(self.first_at - self.began_at)
            self._desk.first_token(self)
        if self.passage is not None:
            self.passage.got_over(self)

    def _stop(self, chunk: Chunk | None) -> None:
        """A stop string has been reached: the worker need not go on."""
        if chunk is None or chunk.finish is None:
            self._cancel_stream("complete")
        self._land("stop")

    def _told(self, error: str) -> None:
        """The worker says that it cannot go on."""
        reason, _, detail = error.partition(":")
        if reason == "invalid_request":
            message = detail.strip() or "the worker refused the request"
            if self.seat is not None:
                self._desk.unjudged(self, self.seat)
            self._leave()
            self._abort(ApiError(400, message, code="invalid_request"))
        else:
            self._failed(classify(error))

    # --- moving on purpose: nothing has failed, it costs no budget, and nobody is excluded by it -----------------

    @property
    def ready(self) -> bool:
        """Whether it flows, and nothing is being done about it: it could move now."""
        return self.flows and self.crossing is None

    @property
    def stays(self) -> bool:
        """Whether it is not to be moved on purpose."""
        return self.done or bool(self.continuation.texts) or self.allowance.stays(self._length())

    def switch(self, target: Seat, rank: int, stream: int, move: Move) -> None:
        """Go on at this rank of `target`, which has taken the KV cache over and decodes."""
        source = self._part()
        self._feeding.carried()
        self._desk.alighted(self, source)
        self._way.move = move
        slot = self._desk.routing.choosing.carry(target, rank, self.plan, self.accepted)
        self._board(target, rank, stream, slot, paid=False)

    def compute_again(self, target: Seat, move: Move) -> None:
        """Leave a worker that has not failed, and go on elsewhere by the tokens alone."""
        self._part()
        self._leave()
        self._way.move = move
        self.launch(target, free=True)

    def _part(self) -> Seat:
        """Take all that this worker has said, and cancel the stream there."""
        source = self.seat
        assert source is not None
        self.crossing = None
        self._account()
        self._cancel_stream("elsewhere")
        self._desk.unjudged(self, source)
        return source

    # --- moving -------------------------------------------------------------------------------------------

    def evict(self, others: Collection[Key], *, corrupt: bool) -> None:
        """The fleet took this worker out of service: go on elsewhere, at once if any of `others` can still be tried.

        From a worker that is only slow or silent a stream does not move into nowhere: it stays while it
        flows.
        """
        if self.done or self.seat is None:
            return
        if not corrupt and (
            self.allowance.refusal(self._length())
            or not any(key not in self.allowance.tried for key in others)
        ):
            return
        self._cancel_stream("elsewhere")
        self._failed(Failure("unhealthy", ""), spoilt=corrupt)

    def expose(self, first: int, key: Key) -> str:
        """Tokens from index `first` on may be wrong, because this worker was. Do what `on_corruption` says, and return what
        was done."""
        on_source = self.seat is not None and self.seat.key == key
        wish = self._desk.settings.on_corruption
        seen = self.voice.reached > first
        if wish == "error" or (wish == "restart" and seen):
            self._cancel_stream()
            if self.seat is not None:
                self._way.interrupted(begun=self._plain)
            self._leave()
            self._desk.abandoned(self, "corrupt_output")
            message = "the worker that answered was found to compute wrong results; ask again"
            self._abort(ApiError(502, message, code="corrupt_output"))
            return "error"
        if seen:
            self._way.spoilt = True
            if not on_source and self._feeding.hangs_on(
                key
            ):  # well where it is, but with a KV cache from there
                self._cancel_stream("elsewhere")
                self._failed(Failure("unhealthy", "corrupt KV cache"), on_source=False)
            return "continue"  # a flight that is still there is moved with all others of its worker
        self._cancel_stream("elsewhere")
        self._rewind(0 if self.continuation.texts else first)  # where a text can be cut is not known
        self._failed(Failure("unhealthy", "corrupt output"), on_source=on_source)
        return "error" if self.error is not None else "restart"

    def _rewind(self, count: int) -> None:
        """Forget what came after the first `count` tokens; nobody has seen it."""
        self.continuation.rewind(count)
        self._counted = min(self._counted, count)
        self.voice.rewind(count)

    def retry(self, planned: Seat | None = None) -> None:
        """Go on elsewhere, after a failure or after having been parked: where it was planned, else where there is room."""
        if self.done or self.seat is not None:
            return
        try:
            self.launch(planned)
        except Exception:  # it must not keep those that were planned with it from going on
            self._mistaken()

    def give_up(self) -> None:
        """Nobody has come in time."""
        if not self.done and (move := self._move) is not None:
            self._abandon("no_worker", move.original)

    def too_late(self) -> None:
        """The first token has not come within its deadline."""
        if not self.done and self.first_at is None:
            self._cancel_stream()
            self._leave()
            if self._move is not None:
                self._desk.abandoned(self, "first_token_timeout")
            message = "no token came in time"
            self._abort(ApiError(503, message, code="first_token_timeout", retry_after_s=1))

    def _failed(self, failure: Failure, *, spoilt: bool = False, on_source: bool = True) -> None:
        """An attempt has ended. Go on elsewhere, or tell the client why not."""
        seat, now, way = self.seat, self._desk.now(), self._way
        original = failure  # where the attempt has brought nothing: the one that it was to make good
        refused = (
            self.refused if failure.reason == "engine_shutdown" else ""
        )  # it was wanted elsewhere before
        if way.move is not None:
            if not way.move.original.planned:
                original = way.move.original
            way.arrived(self, well=False)
        if seat is not None:
            way.interrupted(begun=self._plain)
            if on_source:
                self.allowance.note(seat.key, failure.kind, begun=self._plain or not self._paid)
            else:
                self.allowance.spent -= 1  # a well worker only begins anew
            if failure.kind.blames:
                self._desk.blame(seat, failure, self.under, self.sent)
            else:
                self._desk.unjudged(self, seat)
            if self.crossing is not None:
                refused = "its source failed meanwhile"
            self._leave(failed=True)
        if len(self.accepted) >= self.plan.sampling.max_tokens:
            self._land("length")  # only the worker's last word is missing
            return
        if refusal := self.allowance.refusal(self._length()):
            self._abandon(refusal, original)
            return
        way.spoilt = way.spoilt or spoilt
        source = seat or self.first_seat
        assert source is not None
        way.move = Move(failure, original, source, now, len(self.accepted), refused=refused)
        if original is not failure and failure.kind.again:
            self.not_before = now + PAUSE_S  # two in a row: more may be dying, as all workers of a host do
            self._desk.park(self)
        else:
            self._desk.departures.add(self)

    @property
    def flows(self) -> bool:
        """Whether the worker that it is with has given it tokens."""
        return self.seat is not None and self._plain

    @property
    def moving_since(self) -> float:
        """When the failure was noticed after which this flight has not got on yet."""
        move = self._move
        return move.since if move is not None else self._desk.now()

    @property
    def _move(self) -> Move | None:
        """The move that it is in the middle of."""
        return self.passage.move if self.passage is not None else None

    @property
    def _way(self) -> Passage:
        """What it has to get over, from now on."""
        if self.passage is None:
            self.passage = Passage(self._desk, self.plan)
        return self.passage

    def _length(self) -> int:
        return len(self.plan.prompt) + len(self.accepted)

    # --- ending -------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """The client has gone: nobody reads this any more."""
        if self.done:
            return
        moving = self._move is not None
        self._cancel_stream()
        if self.seat is not None:
            self._desk.unjudged(self, self.seat)
        self._leave()
        if moving:
            self._desk.abandoned(self, "cancelled")
        self.finish = "cancelled"
        self._end()

    def _land(self, reason: str) -> None:
        seat = self.seat
        if self.passage is not None:
            self.passage.got_over(self)
        self._leave()
        if seat is not None:
            self._desk.landed(self, seat)
        self.finish = reason
        self.voice.finish(reason)
        self._end()

    def _abandon(self, reason: str, failure: Failure) -> None:
        self._desk.abandoned(self, reason)
        self._abort(failure.error)

    def _abort(self, error: ApiError) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        self.done = True
        self._feeding.end()
        if self.passage is not None:
            self.passage.move = None
            self.passage.restored("cancelled" if self.finish == "cancelled" else "failure")
        self._desk.ended(self)
        ended, self._ended = self._ended, _nothing  # no cycle: what is over is freed at once
        ended(self)
        self.voice.flush()

    def _mistaken(self) -> None:
        """A mistake of ours, just caught: this client is told, and nobody else is touched."""
        log.exception("stream_failed", request=self.plan.request)
        self._cancel_stream()
        self._leave()
        self._abort(internal())

    def _leave(self, *, failed: bool = False) -> None:
        """Get off the worker, where the answer has ended, or failed."""
        self._account()
        if self.crossing is not None:
            crossing, self.crossing = self.crossing, None
            crossing.left(failed=failed)
        if self.seat is None:
            return
        seat, self.seat = self.seat, None
        self._feeding.leave()
        self._desk.alighted(self, seat)

    def _cancel_stream(self, why: Why = "gone") -> None:
        if self.seat is not None:
            if why == "elsewhere" and self._desk.table.drains(self.seat):
                why = "drained"
            self._desk.plane.cancel(self.seat.worker, self.stream, why)


def _nothing(flight: Flight) -> None:
    pass
