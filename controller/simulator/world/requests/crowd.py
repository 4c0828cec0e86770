"""Requests before workers that take only so many at once: who finds no room waits in a line, until his time is over.

The queue is production's (`controller.frontend.admission.queue`), and so is the filter that finds room. What other frontends have
at a worker is known as of its last report. A worker that has no room after all refuses: that is no failure, and the request is
sent back, before all that wait.
"""

from random import Random

from controller.router.endpoints import EndpointTable, Key
from controller.router.load.monitor import LoadLimits
from controller.router.selection.filter import AllBusy, Headroom, NoWorker
from controller.simulator.world.kernel import MS, SECOND
from controller.simulator.world.machines import Machine
from controller.simulator.world.requests.traffic import SimulatedRequest, WaitingRequest
from controller.simulator.world.requests.underway import RequestsUnderWay, SendingProcess
from controller.simulator.world.requests.waiting import WaitingLines
from events.observations import RequestAbandoned, RequestsRejected
from events.wire import Load

REPORT = SECOND
REROUTE = 10 * SECOND  # that one that has begun waits for room elsewhere
WAITS = (2, 10, 40)  # seconds, of which one is drawn for each request
LONGER = 4.0  # answers take so much longer here: few requests make a crowd
ANSWER_S = LONGER * 4.5  # that they take on average


class CrowdedRequests(RequestsUnderWay):
    """The requests of one such process, those that wait among them."""

    def __init__(self, frontend: SendingProcess, chance: Random) -> None:
        super().__init__(frontend, chance)
        self.refused: set[tuple[str, int, str]] = set()  # request, attempt, instance that had no room
        self.lines = WaitingLines(self._seams.lines)
        self._kernel.after(chance.randrange(REPORT), self._report)

    def close(self) -> None:
        """End with the process, also for those who wait."""
        super().close()
        self._traffic.tally.lost += len([*self.lines])
        for request in self.requests:
            self.machine(request).standing.leave(request)

    def unanswered(self) -> int:
        """Return how many requests have had no answer yet."""
        return super().unanswered() + len([*self.lines]) if self.open else 0

    def best_waiting(self, model: str) -> int | None:
        """Return the best tier of which anybody waits in line; None: nobody does."""
        return self.lines.best(model)

    def could_take(self, machine: Machine) -> bool:
        """Say whether one request more could go to this worker: it serves, may be tried, and has room."""
        endpoint = self._table.endpoints.get((machine.name, machine.instance))
        if endpoint is None or not endpoint.routable or not machine.reachable(self._name) or machine.draining:
            return False
        self._look(machine.model)
        load = self._rules.load
        return self._allowed(endpoint) and len(machine.standing.held) < load.cap(endpoint)

    def _limits(self) -> tuple[LoadLimits, EndpointTable]:
        """Return how many requests may be with a worker: its batch, and less on a degradation level."""
        return LoadLimits(inflight_per_batch=1.0), self._table

    # --- the way in -------------------------------------------------------------------------------------------------

    def take_in(self, id: str, model: str, tier: str) -> None:
        """Let a request stand in line, and look whether it may go at once."""
        now = self._kernel.now
        latest = now + self._chance.choice(WAITS) * SECOND
        waiting = WaitingRequest(id, model, tier, self._table.urgency(tier), now, latest)
        self.lines.push(waiting, self._name)
        self._kernel.after(latest - now, self._late, waiting)
        self._wake(model)

    def _wake(self, model: str) -> None:
        """Let those who wait look for room."""
        if self.open:
            self.lines.let_in(model, self._kernel.now / SECOND, self._goes)

    def _goes(self, waiting: WaitingRequest) -> bool:
        """Send one who waits to a worker, or tell him that there is none. False: all are busy."""
        try:
            endpoint = self._picker.pick(self._look(waiting.model), self._rules, waiting.avoid)
        except AllBusy:
            return False
        except NoWorker:
            self._traffic.tally.unserved += 1
            if waiting.attempt > 1:
                self._give_up(waiting, "no_worker")
            return True
        sent, number = self._breakers.routed(endpoint.key), self._table.number
        self._begin(
            SimulatedRequest(
                waiting.request, waiting.model, endpoint, number, sent, waiting.attempt, waiting.tokens,
                waiting.avoid, waited=waiting,
            )
        )  # fmt: skip
        return True

    def _late(self, waiting: WaitingRequest) -> None:
        """One who waits has waited for as long as he may."""
        if not self.open or not self._seams.leaves_late() or not self.lines.leave(waiting):
            return
        if waiting.attempt > 1:
            self._traffic.tally.lost += 1
            self._give_up(waiting, "no_room")
            return
        self._traffic.tally.rejected += 1
        self._observe(
            RequestsRejected(
                frontend=self._name, model=waiting.model, count=1, reason="deadline", tier=waiting.tier
            )
        )

    def _give_up(self, waiting: WaitingRequest, reason: str) -> None:
        worker, instance = waiting.avoid[-1] if waiting.avoid else ("", "")
        self._observe(
            RequestAbandoned(
                frontend=self._name, request=waiting.request, model=waiting.model, worker=worker, instance=instance,
                reason=reason, tokens=waiting.tokens,
            )
        )  # fmt: skip

    # --- at the worker ----------------------------------------------------------------------------------------------

    def _route(
        self, id: str, model: str, attempt: int, tokens: int, avoid: tuple[Key, ...]
    ) -> SimulatedRequest | None:
        """Send one that has begun on, whatever the frontends' own bound is: its worker may still refuse it."""
        self.room = Headroom.HELD
        try:
            return super()._route(id, model, attempt, tokens, avoid)
        finally:
            self.room = Headroom.FRESH

    def _send(self, request: SimulatedRequest) -> None:
        self.refused.discard((request.request, request.attempt, request.instance))
        machine = self.machine(request)
        there = machine.up and machine.instance == request.instance and machine.reachable(self._name)
        if there and not machine.draining and not machine.takes(request):
            self._kernel.after(5 * MS, self._turned_away, request)
        else:
            super()._send(request)

    def _takes(self, machine: Machine) -> int:
        return int(LONGER * super()._takes(machine))

    def _leave(self, request: SimulatedRequest) -> None:
        super()._leave(request)
        self.machine(request).standing.leave(request)
        if self._seams.wakes():
            self._kernel.after(0, self._wake, request.model)

    def _turned_away(self, request: SimulatedRequest) -> None:
        """The worker has no room after all."""
        if self._gone(request):
            return
        self.refused.add((request.request, request.attempt, request.instance))
        if taken_for := self._seams.refusal():
            request.refused = taken_for == "failed"
            taken = self._failed if request.refused else self.moved_on
            taken(request, "engine_error")
            return
        request.endpoint.refuse(self.links.others.get(request.worker))
        self._leave(request)
        self._send_back(request)

    def _send_back(self, request: SimulatedRequest) -> None:
        now, waiting = self._kernel.now, request.waited
        if waiting is not None:
            waiting.let_in = True
            waiting.attempt, waiting.tokens, waiting.avoid = request.attempt, request.tokens, request.avoid
        else:
            waiting = WaitingRequest(
                request.request, request.model, "", 0, now, now + REROUTE, True, request.attempt, request.tokens,
                request.avoid,
            )  # fmt: skip
            self._kernel.after(REROUTE, self._late, waiting)
        self.lines.push_back(waiting)
        if now > waiting.latest:
            self._late(waiting)

    def _report(self) -> None:
        """Hear from each worker what others have there, and let those who wait look."""
        if not self.open:
            return
        self._kernel.after(REPORT, self._report)
        for name, machine in self._traffic.machines.items():
            if machine.reachable(self._name):
                held = machine.standing.held
                self.links.others[name] = Load(running=sum(request not in self.requests for request in held))
        for model in {waiting.model for waiting in self.lines} if self._seams.wakes() else ():
            self._wake(model)
