"""Requests before workers that take only so many at once: those that find no room wait in line, until their time is over.

The queue is production's (`controller.frontend.admission.queue`), and so is the filter that finds room. What other frontends have
at a worker is known as of its last report. A worker that has no room after all turns a request away: that is no failure, and the
request waits once more, before all others.
"""

import itertools
from random import Random

from controller.frontend.admission.queue import Queue, QueuedRequest
from controller.frontend.errors import ApiError
from controller.frontend.request import effects as do
from controller.frontend.request import events as on
from controller.frontend.request.failures import FULL, Failure
from controller.router.endpoints import Endpoint, EndpointTable
from controller.router.load.monitor import LoadLimits
from controller.router.selection.filter import AllBusy, Headroom, NoWorker
from controller.simulator.world.kernel import MS, SECOND
from controller.simulator.world.machines import Machine
from controller.simulator.world.requests.traffic import RequestSender, SimulatedRequest
from controller.simulator.world.requests.underway import RequestsUnderWay
from events.observations import RequestsRejected
from events.wire import Load

REPORT = SECOND
REROUTE = 10 * SECOND  # that one that has begun waits for room elsewhere
WAITS = (2, 10, 40)  # seconds, of which one is drawn for each request
LONGER = 4.0  # answers take so much longer here: few requests make a crowd
ANSWER_S = LONGER * 4.5  # that they take on average
TOO_LATE = ApiError(503, "no room came in time", code="deadline")


class CrowdedRequests(RequestsUnderWay):
    """The requests of one such process, those that wait among them."""

    def __init__(self, frontend: RequestSender, chance: Random) -> None:
        super().__init__(frontend, chance)
        self._queue = Queue(line=self._seams.lines)
        self._numbers = itertools.count()
        self._queued: dict[SimulatedRequest, QueuedRequest] = {}
        self._in_line: dict[int, SimulatedRequest] = {}  # by number in the queue
        self._kernel.after(chance.randrange(REPORT), self._report)

    def close(self) -> None:
        """End with the process."""
        super().close()
        for request in self.requests:
            self.machine(request).standing.leave(request)

    def unanswered(self) -> int:
        """Return how many requests have had no answer yet."""
        return super().unanswered() + len(self._queued) if self.open else 0

    def waiting(self) -> list[SimulatedRequest]:
        """Return the requests in line."""
        return [*self._queued]

    def best_waiting(self, model: str) -> int | None:
        """Return the best tier of the requests in line; None: none waits."""
        return min((one.tier for line in self._queue.lines(model) for one in line), default=None)

    def could_take(self, machine: Machine) -> bool:
        """Return whether one more request could go to this worker: it serves, may be tried, and has room."""
        endpoint = self._table.endpoints.get((machine.name, machine.instance))
        if endpoint is None or not endpoint.routable or not machine.reachable(self._name) or machine.draining:
            return False
        self._look(machine.model)
        load = self._rules.load
        return self._allowed(endpoint) and len(machine.standing.held) < load.cap(endpoint)

    def _limits(self) -> tuple[LoadLimits, EndpointTable]:
        """Return how many requests may be with a worker: its batch, and less on a degradation level."""
        return LoadLimits(inflight_per_batch=1.0), self._table

    # --- the line ---------------------------------------------------------------------------------------------------

    def take_in(self, id: str, model: str, tier: str) -> None:
        """Let a request stand in line, and look whether it may go at once."""
        request = self._new(id, model, tier)
        self._wait(request, self._chance.choice(WAITS) * SECOND)
        since, latest = request.since / SECOND, request.latest / SECOND
        self._push(request, QueuedRequest(model, None, request.rank, self._name, 1.0, since, latest))
        self._wake(model)

    def _wait(self, request: SimulatedRequest, wait: int) -> None:
        request.waits, request.latest = True, self._kernel.now + wait
        self._kernel.after(wait, self._late, request, request.latest)

    def _push(self, request: SimulatedRequest, queued: QueuedRequest) -> None:
        queued.number = next(self._numbers)
        self._in_line[queued.number], self._queued[request] = request, queued
        self._queue.line_of(queued).push(queued)

    def _push_back(self, request: SimulatedRequest) -> None:
        """Put a request before all in line: its worker had no room."""
        if request in self._queued:
            return
        if not request.waits:
            self._wait(request, REROUTE)
        self._push(request, QueuedRequest(request.model, sent_back=True))
        if self._kernel.now > request.latest:
            self._late(request, request.latest)

    def _remove(self, queued: QueuedRequest, *, served: bool) -> None:
        if queued.number in self._in_line:
            del self._queued[self._in_line.pop(queued.number)]
            self._queue.line_of(queued).remove(queued, served=served)

    def _wake(self, model: str) -> None:
        """Send each request that was sent back, then the head of each line, until one finds no room."""
        if not self.open:
            return
        for queued in self._queue.sent_back(model):
            if self._goes(self._in_line[queued.number]):
                self._remove(queued, served=True)
        for line in self._queue.lines(model):
            while (head := line.head(self._kernel.now / SECOND)) and self._goes(self._in_line[head.number]):
                self._remove(head, served=True)

    def _goes(self, request: SimulatedRequest) -> bool:
        """Send a request from the line, or end it if there is no worker. False: all are busy."""
        phase = request.state.phase
        self.feed(
            request,
            on.Launched() if phase == "new" else on.Woken() if phase == "parked" else on.Resumed(),
        )
        return request.state.phase not in ("queued", "parked")

    def _late(self, request: SimulatedRequest, latest: int) -> None:
        """A request has waited for as long as it may."""
        queued = self._queued.get(request)
        if not self.open or not self._seams.leaves_late() or queued is None or request.latest != latest:
            return
        self._remove(queued, served=False)
        if request.attempt > 1:
            self._traffic.tally.lost += 1
            self._abandoned(request, "no_room")
        else:
            self._traffic.tally.rejected += 1
            self._frontend.outbox.observe(
                RequestsRejected(
                    frontend=self._name, model=request.model, count=1, reason="deadline", tier=request.tier
                )
            )
        self.feed(request, on.RequestRejected(TOO_LATE))

    # --- at the worker ----------------------------------------------------------------------------------------------

    def _apply(self, request: SimulatedRequest, effect: do.Effect) -> on.Event | None:
        match effect:
            case do.TurnedAway():
                request.endpoint.refuse(self.links.others.get(request.worker))
            case do.QueueAgain():
                self._push_back(request)
            case do.Park() if isinstance(self._none, AllBusy):
                self._push_back(request)
            case _:
                return super()._apply(request, effect)
        return None

    def was_refused(self, request: SimulatedRequest) -> bool:
        """Return whether all that was wrong with the last attempt is that its worker had no room."""
        return (
            bool(request.sent_times)
            and (request.request, request.attempt, request.instance) in self._traffic.refused
        )

    def _pick(self, request: SimulatedRequest, effect: do.SelectWorker) -> Endpoint:
        """Return the worker that gets a request: one that has begun goes on whatever the frontends' own bound is."""
        in_line = request in self._queued
        if not in_line and self.was_refused(request):
            raise AllBusy
        request.waits = in_line
        room = Headroom.FRESH if in_line else Headroom.HELD
        try:
            return self._picker.pick(self._look(request.model), self._rules, effect.avoid, room)
        except AllBusy:
            if in_line:
                raise
            raise NoWorker from None

    def _send(self, request: SimulatedRequest) -> None:
        self._traffic.refused.discard((request.request, request.attempt, request.instance))
        machine = self.machine(request)
        there = machine.up and machine.instance == request.instance and machine.reachable(self._name)
        if there and not machine.draining and not machine.takes(request):
            self._kernel.after(5 * MS, self._turned_away, request, request.sent_times)
        else:
            super()._send(request)

    def _takes(self, machine: Machine) -> int:
        return int(LONGER * super()._takes(machine))

    def _leave(self, request: SimulatedRequest) -> None:
        super()._leave(request)
        self.machine(request).standing.leave(request)
        if self._seams.wakes():
            self._kernel.after(0, self._wake, request.model)

    def _turned_away(self, request: SimulatedRequest, sent: int) -> None:
        """The worker has no room after all."""
        if self._gone(request, sent):
            return
        self._traffic.refused.add((request.request, request.attempt, request.instance))
        self.feed(request, on.AttemptFailed(Failure(FULL, ""), self._progress(request)))

    def _report(self) -> None:
        """Read from each worker how many requests others have there, and wake the lines."""
        if not self.open:
            return
        self._kernel.after(REPORT, self._report)
        for name, machine in self._traffic.machines.items():
            if machine.reachable(self._name):
                held = machine.standing.held
                self.links.others[name] = Load(running=sum(request not in self.requests for request in held))
        for model in sorted({one.model for one in self._queued}) if self._seams.wakes() else ():
            self._wake(model)
