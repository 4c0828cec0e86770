"""Admission control of a frontend: admits a request, queues it for a worker, or refuses it.

    admit ─┬─ the frontend drains, or the tier is shed, or all workers exceed the busy thresholds ──▶ refused
    look ──┘ the deadline cannot be met (`Deadlines`) ──▶ refused
    enter    no request waits before it, and a worker has room ──▶ admitted
             └──▶ queued (`Queue`) ── its turn, and a worker has room ──▶ admitted
                    ├── the queue is full, or the wait has timed out, or the frontend shuts down ──▶ refused
                    ├── no worker can serve the model any longer ──▶ refused
                    └── the client disconnects ──▶ removed
    again    an admitted request found no worker with room when it was sent ──▶ queued, before all others

`admit`, `look`, `enter` and `again` are methods of `Admission`; each arrow leads to what happens to the request next.
Room at a worker is a free batch slot, free KV blocks, and capacity to prefill the prompt.

Each refusal has a retry time and is counted in `RequestsRejected` (see `Refusals`). Each model and each adapter has its
own waiting lines, so requests for one never block requests for another. A free slot is offered first to the line of its
model or the model's adapters with the oldest request.

Queued requests get free room only at the end of an event-loop iteration. An admitted request releases its reservation
and is sent to workers within one iteration. So no queued request can take the released room in between.
"""

import asyncio
import itertools
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from controller.frontend.admission.deadlines import Deadlines, Preemptor, RoomFinder
from controller.frontend.admission.queue import EndRate, Queue, QueuedRequest
from controller.frontend.admission.refusals import NotAdmitted, QueueFull, Refusals, WaitedTooLong
from controller.frontend.errors import ApiError
from controller.frontend.openai.request_head import Call
from controller.frontend.request_metrics import RequestMetrics
from controller.frontend.scheduling.scheduler import Scheduler
from controller.frontend.settings import FrontendSettings
from controller.router.endpoints import Endpoint, EndpointTable, Key, Lineage
from controller.router.load.monitor import NOTHING, RequiredRoom
from controller.router.selection.filter import AllBusy, NoWorker
from events.blocks import BlockNames

# number of sent-back requests that may fail to get room before the rest of them are skipped in this pass
LOOKS_MAX = 16
LATEST_S = 86_400.0  # longest delay of a timer
WORK_LEAST = 1e-6  # least work of a queued request, in seconds of one worker
CLOCK_S = 0.005  # a timer may fire this much early


class Reservation:
    """Room at one worker that is reserved for an admitted request until the request is sent.

    Room is a batch slot, KV blocks and prefill capacity. If the prompt is not tokenized yet, it is tokenized while the
    reservation holds the room.
    """

    __slots__ = ("_admission", "_blocks", "_endpoint", "_wanted", "lineage")

    def __init__(self, admission: "Admission", endpoint: Endpoint, wanted: RequiredRoom = NOTHING) -> None:
        """Reserve a batch slot at an endpoint, and the prefill tokens and KV blocks in `wanted`.

        `wanted` is NOTHING if these amounts are not known yet.
        """
        self._admission = admission
        self._endpoint = endpoint
        self._wanted = wanted
        self._blocks = wanted.held / endpoint.block_tokens
        self.lineage = endpoint.lineage  # the request is bound to this lineage from now on
        endpoint.admit(wanted.unread, self._blocks)

    def again(self) -> "Reservation":
        """Reserve the same room at the same endpoint again, for a request that has to wait after all.

        Return the new reservation.
        """
        return Reservation(self._admission, self._endpoint, self._wanted)

    def free(self) -> None:
        """Release the reserved room, and schedule a check of the model's queued requests.

        The caller sends the admitted request to workers in the same event-loop iteration. Queued requests are checked
        only at the end of this iteration, so the admitted request gets the released room first.
        """
        self._endpoint.release(self._wanted.unread, self._blocks)
        self._admission.wake(self._endpoint.joined.model)


@dataclass(slots=True, eq=False, repr=False)
class _Turn:
    """One queued request, the future that resolves to its reserved room, and the timer of its queue timeout."""

    request: QueuedRequest
    room: asyncio.Future[Reservation]
    late: asyncio.TimerHandle
    began: float
    gone: bool = False  # the client has disconnected, perhaps after the room was granted

    @property
    def granted(self) -> bool:
        """Whether the future holds a reservation: the request was granted room at a worker."""
        return self.room.done() and not self.room.cancelled() and self.room.exception() is None


@dataclass(eq=False, repr=False)
class Admission:
    """Admits, queues or refuses the requests of one frontend."""

    settings: FrontendSettings
    table: EndpointTable
    routing: Scheduler
    refusals: Refusals
    meter: RequestMetrics
    preemptor: Preemptor
    open: bool = True  # new requests are accepted
    _turns: dict[int, _Turn] = field(default_factory=dict)  # by request number
    # models and adapters with queued requests that are checked for room at the end of this event-loop iteration
    _due: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        settings = self.settings
        self._queue_s, self._now = settings.admission.queue_s, self.routing.now
        self._queue = queue = Queue(settings.admission.queue_max, model_of=self.table.model_of)
        self._rooms = RoomFinder(self._queue_s, self.table, self.routing, self.preemptor)
        self.deadlines = Deadlines(settings, self.table, self.routing, queue, self._rooms)
        self.by_deadline = settings.by_deadline  # if false, requests are admitted in order of arrival
        self._ends, self._numbers, self._monitor = EndRate(), itertools.count(1), self.routing.monitor
        self.queued, self.waiting, self.forget = queue.queued, queue.waiting, self.deadlines.keep

    # --- admission

    async def admit(self, served: str, tier: str) -> Reservation:
        """Admit a request to a model or adapter and return its reserved room, which the caller must free.

        If no worker has room, the request waits in the queue first. Raise ApiError if the request is refused.
        """
        self.refusals.check(served, tier, draining=not self.open)
        if self._monitor.overloaded(served):
            raise self.refusal(AllBusy(), served, tier)
        try:
            if not self._wakes_sent_back(served) and not self._queue.in_line(served):
                try:
                    return Reservation(self, self._rooms.find(served))
                except AllBusy:
                    pass
            return await self._wait(QueuedRequest(served), self._queue_s * self.table.knobs(served).latency)
        except (NotAdmitted, NoWorker) as error:
            raise self.refusal(error, served, tier) from None

    def look(self, call: Call) -> Lineage:
        """Check a request before its texts are tokenized, and choose the lineage of the workers that may serve it.

        A lineage is the model's revision and tokenizer, which must stay the same until a request has ended. Raise
        ApiError if the request is refused, for example because its deadline cannot be met.
        """
        served, tier = call.parsed.served, call.head.tier
        self.refusals.check(served, tier, draining=not self.open)
        try:
            return self.deadlines.look(call)
        except (NotAdmitted, NoWorker) as error:
            raise self.refusal(error, served, tier) from None

    async def enter(
        self, call: Call, lineage: Lineage, prompts: Sequence[tuple[int, BlockNames]], answer_max: int
    ) -> tuple[Reservation, float]:
        """Admit a request that `look` has accepted. If no worker has room, the request waits in the queue first.

        For each prompt, `prompts` contains the number of tokens and the names of the prompt's KV blocks. `answer_max`
        is the maximum number of tokens of each answer.

        Return the reserved room, which the caller must free, and the monotonic time by which the first token is due.
        Raise ApiError if the request is refused.
        """
        try:
            request = self.deadlines.needs(call, lineage, prompts, answer_max)
            room = self._room_at_once(request)
            if room is None:
                room = await self._wait_in_time(request)
            else:
                self.deadlines.pool(request.served, lineage).arrived(request, self._now())
        except (NotAdmitted, NoWorker) as error:
            raise self.refusal(error, call.parsed.served, call.head.tier) from None
        return room, request.since + request.deadline_s

    def _room_at_once(self, request: QueuedRequest) -> Reservation | None:
        """Return reserved room if the request can be sent now. If necessary, preempt a running answer first.

        Return None if the request must wait. Raise NotAdmitted or NoWorker if the request is refused.
        """
        room: Reservation | None = None
        line = self._queue.line_of(request)
        if not len(line) and not self._wakes_sent_back(request.served):
            with suppress(AllBusy):
                room = Reservation(self, self._rooms.for_queued(request), request.wanted)
        try:
            preempts = self.deadlines.judge(request, room=room is not None)
        except BaseException:
            if room is not None:
                room.free()
            raise
        if preempts and (made := self._rooms.preempt(request, first=not len(line))) is not None:
            return Reservation(self, made, request.wanted)
        return room

    async def _wait_in_time(self, request: QueuedRequest) -> Reservation:
        request.work, now = max(request.work, WORK_LEAST), self._now()
        leaves = min(request.latest, now + request.line_s)
        try:
            return await self._wait(request, min(LATEST_S, leaves - now))
        except WaitedTooLong:
            if self._now() < leaves - CLOCK_S:
                raise  # this frontend shuts down
            raise self.deadlines.timed_out(request) from None

    def again(
        self, served: str, lineage: Lineage, wait_s: float, without: Collection[Key] = ()
    ) -> asyncio.Future[Reservation]:
        """Put an admitted request back into the queue, because no worker had room when the request was to be sent.

        In the queue, the request precedes all requests that have not been admitted before. The request gets no room at
        the endpoints in `without`.

        The future resolves to the reserved room, or fails with WaitedTooLong or a NoWorker other than AllBusy. To
        withdraw the request, cancel the future or, if the future is done, free the room.
        """
        turn = self._turn(QueuedRequest(served, lineage, sent_back=True, without=without), wait_s)
        turn.room.add_done_callback(partial(self._leave, turn))
        self.wake(served)
        return turn.room

    # --- waiting

    def _wakes_sent_back(self, served: str) -> bool:
        """Schedule a check of the sent-back requests to a model or adapter, if there are any. Return whether there are any.

        A sent-back request was admitted, but no worker had room when the request was to be sent.
        """
        if not self._queue.sent_back(served):
            return False
        self.wake(served)
        return True

    def _turn(self, request: QueuedRequest, wait_s: float) -> _Turn:
        loop, request.number = asyncio.get_running_loop(), next(self._numbers)
        self._queue.line_of(request).push(request)
        room: asyncio.Future[Reservation] = loop.create_future()
        late = loop.call_later(wait_s, _refuse, room, f"no worker became free within {wait_s:g} s")
        turn = self._turns[request.number] = _Turn(request, room, late, loop.time())
        return turn

    async def _wait(self, request: QueuedRequest, wait_s: float) -> Reservation:
        """Queue a request and return the room that it is granted.

        Raise QueueFull, WaitedTooLong, or a NoWorker other than AllBusy.
        """
        if self._queue.full(request.served):
            raise QueueFull(
                f"{self._queue.in_line(request.served)} requests are already waiting for a worker"
            )
        if request.lineage is not None:
            self.deadlines.pool(request.served, request.lineage).arrived(request, self._now())
        turn = self._turn(request, wait_s)
        try:
            return await turn.room
        except asyncio.CancelledError:
            turn.gone = True
            raise
        finally:
            self._leave(turn, turn.room)

    def _leave(self, turn: _Turn, room: "asyncio.Future[Reservation]") -> None:
        """Remove a request from the queue when its wait ends, and record the outcome and the waiting time in the metrics."""
        served = turn.request.served
        turn.late.cancel()
        self._dequeue(turn)
        del self._turns[turn.request.number]
        if turn.gone or room.cancelled() or not room.done():
            outcome = "gone"
            if turn.granted:
                room.result().free()
            self.wake(served)  # this request may have blocked the requests behind it
        elif (error := room.exception()) is None:
            outcome = "admitted"
        else:
            outcome = "timeout" if isinstance(error, WaitedTooLong) else "no_worker"
        self.meter.waited(
            self.table.model_of(served), outcome, asyncio.get_running_loop().time() - turn.began
        )

    def _dequeue(self, turn: _Turn) -> None:
        """Remove a request from the queue, if it is still queued."""
        request, room, granted = turn.request, turn.room, turn.granted
        if not request.queued:
            return
        if request.lineage is not None and not request.sent_back:
            pool = self.deadlines.pool(request.served, request.lineage)
            if granted:
                pool.served(request)
            elif room.done() and not room.cancelled() and self._now() >= request.latest - CLOCK_S:
                pool.timed_out(request)
        self._queue.line_of(request).remove(request, served=granted)

    # --- choosing the next request

    def wake(self, served: str | None = None) -> None:
        """Schedule a check of queued requests, because a worker may have room again.

        The check runs at the end of this event-loop iteration. It covers the requests to the model of `served` (a model or
        an adapter) with and without adapters, or all requests if `served` is None.
        """
        if not self._turns:
            return
        for name in self._queue.waiting_with(served):
            if name not in self._due:
                self._due.add(name)
                asyncio.get_running_loop().call_soon(self._advance_lines, name)

    def _advance_lines(self, served: str) -> None:
        """Grant room to the queued requests to a model or adapter until no worker has room.

        Sent-back requests, which were admitted before, precede all others.
        """
        self._due.discard(served)
        without_room = 0
        for request in self._queue.sent_back(served):
            turn = self._turns[request.number]
            if not turn.room.done() and not self._grant(turn):
                without_room += 1
                if without_room == LOOKS_MAX:
                    break
        for line in self._queue.lines(served):
            while (head := line.head(self._now())) is not None:
                turn = self._turns[head.number]
                if not turn.room.done() and not self._grant(turn):
                    break
                self._dequeue(turn)

    def _grant(self, turn: _Turn) -> bool:
        """Grant room to a queued request, or fail its future if no worker can serve the request.

        Return False if all workers are busy. The request then stays queued.
        """
        request = turn.request
        try:
            if request.sent_back:
                found = self._rooms.find(request.served, request.lineage, without=request.without)
            else:
                found = self._rooms.for_head(request, self._now())
            turn.room.set_result(Reservation(self, found, request.wanted))
        except AllBusy:
            return False
        except NoWorker as error:
            turn.room.set_exception(error)
        return True

    # --- notifications and queries

    def best_waiting(self, served: str, lineage: Lineage) -> int | None:
        """Return the best tier among the queued requests for workers of this lineage (model revision and tokenizer).

        Tier 0 is the best. Return None if no request is queued. If requests are admitted in order of arrival, tiers do
        not matter, so also return None.
        """
        head = self._queue.line(served, lineage).head(self._now()) if self.by_deadline else None
        return head.tier if head is not None else None

    def ended(self, model: str, tokens: int) -> None:
        """Record that an answer with `tokens` tokens has ended.

        The rate of ended answers determines the `Retry-After` of refusals. If requests are admitted by deadlines, the
        lengths of answers also predict the work of new requests.
        """
        self._ends.ended(model, self._now())
        if self.by_deadline:
            lengths = self._monitor.lengths
            lengths.ended(model, tokens)

    def refuse_all(self) -> None:
        """Fail all queued requests with WaitedTooLong, because this frontend shuts down."""
        for turn in self._turns.values():
            _refuse(turn.room, "no worker became free before this frontend shut down")

    def refusal(self, error: NotAdmitted | NoWorker, served: str, tier: str) -> ApiError:
        """Return the API error for a request to a model or adapter that is not admitted, and count the refusal."""
        wait_s = self._ends.wait_s(self.table.model_of(served), self._queue.length(served), self._now())
        return self.refusals.of(error, served, tier, wait_s)


def _refuse(room: asyncio.Future[Reservation], why: str) -> None:
    if not room.done():
        room.set_exception(WaitedTooLong(why))
