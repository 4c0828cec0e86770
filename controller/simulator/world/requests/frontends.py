"""Simulates frontend processes and their requests, with the request state machine of production.

The state machine (`controller.frontend.request.step`) decides the effects for each request. This module simulates the
workers and applies these effects.

Requests are few and long-lived, because the tests are about the fleet state under which each request was sent, and about
the order in which outcomes reach the journal. Answers have no tokens: the event of a first token comes directly before the
end of an attempt. A request for which no worker is found is abandoned at once. `live_requests` simulates tokens and waiting.

In a crowd (an overload), each worker accepts a limited number of requests, and further requests are queued until their
timeout. The queue (`controller.frontend.admission.queue`) and the filter for workers with a free slot are production code. A
frontend knows the load of other frontends only from a worker's last report, so a full worker may still have to reject a
request. This rejection is not a failure: the request is queued again, ahead of all others. Without a crowd, workers always
have free slots and no request is queued.
"""

import itertools
from collections.abc import Sequence
from random import Random
from typing import cast

from controller.deciders.breaker import Breaker
from controller.deciders.tiers import TIERS, Tiers
from controller.frontend.admission.queue import Queue, QueuedRequest
from controller.frontend.errors import ApiError
from controller.frontend.health.local_breakers import LocalBreakers, routable_share
from controller.frontend.request import effects as do
from controller.frontend.request import events as on
from controller.frontend.request.effects import Effects
from controller.frontend.request.failures import FULL, Failure, Suspicion
from controller.frontend.request.state import AnswerProgress, Move, RequestState, RequestTerms
from controller.frontend.settings import FactSettings, LocalBreakerSettings
from controller.router.endpoints import ConnectedWorkers, Endpoint, EndpointTable, Server
from controller.router.load.active_sequences import ActiveSequences
from controller.router.load.monitor import LoadLimits, LoadMonitor
from controller.router.selection.filter import AllBusy, Headroom, NoWorker, Picker, Rules
from controller.simulator.world.kernel import MINUTE, MS, SECOND
from controller.simulator.world.machines import Machine
from controller.simulator.world.surroundings import Replica, SimulatedProcess, Surroundings
from controller.simulator.world.traffic import LONGER, SimulatedRequest
from events.decisions import BreakerClosed, HealthStatus
from events.fact import Recorded
from events.observations import MigrationCause, RequestAbandoned, RequestMigrated, RequestsRejected
from events.wire import Load

TICK = 2 * SECOND
WINDOW_S = 30.0  # seconds of a reporting window
CONNECT_DEADLINE = 200 * MS
PANIC_BELOW = 0.5
CAP = 1 << 20  # requests running at one worker: effectively unlimited
TOKENS, TOKENS_PER_ATTEMPT = 64, 8  # tokens of an answer, and of each failed attempt
TERMS = RequestTerms(max_tokens=TOKENS, reroute_s=-1.0)  # a request does not wait for a worker

# Only in a crowd:
REPORT = SECOND
REROUTE = 10 * SECOND  # time for which a started request waits for room at another worker
WAITS = (2, 10, 40)  # queue timeouts in seconds; one is drawn for each request
TOO_LATE = ApiError(503, "no room came in time", code="deadline")


class SimulatedLinks(ConnectedWorkers):
    """The connections of a simulated frontend. All workers count as connected until a request is sent to them."""

    def __init__(self) -> None:
        self.others: dict[str, Load] = {}  # by worker: the last known load of other frontends

    def external_load(self, worker: str) -> Load | None:
        """Return the last known load of other frontends at a worker; None if it is unknown."""
        return self.others.get(worker)


class RequestsUnderWay:
    """The requests of one frontend process: those at a worker and those in the queue."""

    def __init__(self, frontend: "SimulatedFrontend", chance: Random, *, crowded: bool = False) -> None:
        self.open = True  # the process is up
        self.requests: dict[SimulatedRequest, None] = {}  # in order of arrival
        self._frontend, self._chance = frontend, chance
        self._table, self._breakers = frontend.table, frontend.breakers
        self._name, self._refused = frontend.name, frontend.refused
        self._surroundings = surroundings = frontend.surroundings
        self._seams, self._kernel = surroundings.seams, surroundings.kernel
        self._machines, self._tally = surroundings.machines, surroundings.tally
        self._picker = Picker()
        self._ignoring = False
        self._none = NoWorker()  # why the last request found no worker
        self.links = SimulatedLinks()
        self.crowded = crowded = crowded or surroundings.scenario.crowd is not None
        # The limit of requests at a worker, and the table with the degradation levels that change it. In a crowd the limit is
        # one batch, and less on a degradation level.
        limits = LoadLimits(inflight_per_batch=1.0) if crowded else LoadLimits(CAP)
        levels = self._table if crowded else EndpointTable()
        self._rules = Rules(
            self.links, LoadMonitor(limits, levels, self.links, ActiveSequences(), lambda: 0.0)
        )
        self._queue = Queue(line=self._seams.lines)
        self._numbers = itertools.count()
        self._queued: dict[SimulatedRequest, QueuedRequest] = {}
        self._in_line: dict[int, SimulatedRequest] = {}  # by number of the queue entry
        if crowded:
            self._kernel.after(chance.randrange(REPORT), self._report)

    def close(self) -> None:
        """Drop all requests, because the process has ended. They count as lost."""
        self._tally.lost += self.unanswered()
        self.open = False
        for request in self.requests:
            self.machine(request).held.discard(request)

    def unanswered(self) -> int:
        """Return the number of requests without an outcome; 0 after the process has ended."""
        return len(self.requests) + len(self._queued) if self.open else 0

    def waiting(self) -> list[SimulatedRequest]:
        """Return the queued requests."""
        return [*self._queued]

    def best_waiting(self, model: str) -> int | None:
        """Return the rank of the best tier among a model's queued requests, where 0 is the best tier.

        None means that no request is queued.
        """
        return min((one.tier for line in self._queue.lines(model) for one in line), default=None)

    def could_serve(self, machine: Machine) -> bool:
        """Return whether one more request could be sent to this worker.

        The worker must be routable, reachable and not draining, its breaker must allow requests, and it must have a free
        slot.
        """
        endpoint = self._table.endpoints.get((machine.name, machine.instance))
        if endpoint is None or not endpoint.routable or not machine.reachable(self._name) or machine.draining:
            return False
        self._look(machine.model)
        load = self._rules.load
        allowed = self._ignoring or self._breakers.allowed(endpoint)
        return allowed and len(machine.held) < load.cap(endpoint)

    # --- the machine --------------------------------------------------------------------------------------------

    def feed(self, request: SimulatedRequest, event: on.Event) -> None:
        """Pass an event to a request's state machine, and apply the effects."""
        following: on.Event | None = event if self.open else None
        while following is not None:
            effects = self._step(request, following)
            following = None
            for effect in effects:
                following = self._apply(request, effect)

    def _step(self, request: SimulatedRequest, event: on.Event) -> Effects:
        request.state, effects = self._seams.step(request.state, event, self._kernel.now / SECOND)
        return effects

    def _apply(self, request: SimulatedRequest, effect: do.Effect) -> on.Event | None:
        """Apply one effect. Return the next event for the state machine, or None."""
        match effect:
            case do.SelectWorker():
                return self._route(request, effect)
            case do.LeaveWorker():
                self._leave(request)
            case do.Complete():
                self._leave(request)
                self._served(request)
            case do.Judge(failure):
                if failure.kind.blames:
                    self._blame(request, failure.reason)
                return on.Judged(Suspicion.NONE)
            case do.Reroute():
                return on.Resumed()
            case do.TurnedAway():
                request.endpoint.refused_at = self.links.others.get(request.worker)
            case do.QueueAgain():
                self._push_back(request)
            case do.Park():
                if not isinstance(self._none, AllBusy):
                    return on.Tick()
                self._push_back(request)
            case do.Refuse():
                self._tally.unserved += 1
            case do.ReportAbandoned(reason):
                if reason == NoWorker.code:
                    self._tally.unserved += 1
                else:
                    self._tally.lost += 1
                self._abandoned(request, reason)
        return None

    # --- the queue -----------------------------------------------------------------------------------------------

    def admit(self, id: str, model: str, tier: str) -> None:
        """Accept a new request.

        In a crowd the request is queued, and sent at once only if no request is ahead of it.
        """
        request = self._new(id, model, tier)
        if not self.crowded:
            self.feed(request, on.Launched())
            return
        self._wait(request, self._chance.choice(WAITS) * SECOND)
        since, latest = request.since / SECOND, request.latest / SECOND
        self._push(request, QueuedRequest(model, None, request.rank, self._name, 1.0, since, latest))
        self._wake(model)

    def _wait(self, request: SimulatedRequest, wait: int) -> None:
        request.waits, request.latest = True, self._kernel.now + wait
        self._kernel.after(wait, self._expire, request, request.latest)

    def _push(self, request: SimulatedRequest, queued: QueuedRequest) -> None:
        queued.number = next(self._numbers)
        self._in_line[queued.number], self._queued[request] = request, queued
        self._queue.line_of(queued).push(queued)

    def _push_back(self, request: SimulatedRequest) -> None:
        """Queue a request ahead of all others, because its worker had no free slot."""
        if request in self._queued:
            return
        if not request.waits:
            self._wait(request, REROUTE)
        self._push(request, QueuedRequest(request.model, sent_back=True))
        if self._kernel.now > request.latest:
            self._expire(request, request.latest)

    def _remove(self, queued: QueuedRequest, *, served: bool) -> None:
        if queued.number in self._in_line:
            del self._queued[self._in_line.pop(queued.number)]
            self._queue.line_of(queued).remove(queued, served=served)

    def _wake(self, model: str) -> None:
        """Send queued requests of a model: first those that a worker had rejected, then the first ones of each line.

        A line is finished when all workers are busy.
        """
        if not self.open:
            return
        for queued in self._queue.sent_back(model):
            if self._dispatch(self._in_line[queued.number]):
                self._remove(queued, served=True)
        for line in self._queue.lines(model):
            while (head := line.head(self._kernel.now / SECOND)) and self._dispatch(
                self._in_line[head.number]
            ):
                self._remove(head, served=True)

    def _dispatch(self, request: SimulatedRequest) -> bool:
        """Send a queued request, or end it if no worker exists for it. Return False if all workers are busy."""
        begin: dict[str, on.Event] = {"new": on.Launched(), "parked": on.Woken()}
        self.feed(request, begin.get(request.state.phase, on.Resumed()))
        return request.state.phase not in ("queued", "parked")

    def _expire(self, request: SimulatedRequest, latest: int) -> None:
        """End a request that is still queued at its timeout `latest`."""
        queued = self._queued.get(request)
        if not self.open or not self._seams.leaves_late or queued is None or request.latest != latest:
            return
        self._remove(queued, served=False)
        if request.attempt > 1:
            self._tally.lost += 1
            self._abandoned(request, "no_room")
        else:
            self._frontend.report_rejected(request.model, "deadline", request.tier)
        self.feed(request, on.RequestRejected(TOO_LATE))

    def _new(self, id: str, model: str, tier: str) -> SimulatedRequest:
        now = self._kernel.now
        state = RequestState(TERMS, now / SECOND)
        return SimulatedRequest(id, model, state, tier, self._table.urgency(tier), now)

    # --- routing ------------------------------------------------------------------------------------------------

    def _route(self, request: SimulatedRequest, effect: do.SelectWorker) -> on.Event:
        try:
            endpoint = self._pick(request, effect)
        except NoWorker as none:
            self._none = none
            return self._no_worker(request, none)
        if not self._connects(request, endpoint):
            return on.ConnectFailed(endpoint.key)
        self._begin(request, endpoint)
        return on.Sent(Server(endpoint.key))

    def _no_worker(self, request: SimulatedRequest, none: NoWorker) -> on.NoWorkerFound:
        return on.NoWorkerFound((AllBusy if isinstance(none, AllBusy) else NoWorker).code)

    def _pick(self, request: SimulatedRequest, effect: do.SelectWorker) -> Endpoint:
        """Return the worker for a request.

        A request that has already begun may also go to a worker that has reached this frontend's own limit.
        """
        in_line = request in self._queued
        if not in_line and request.sent_times and self._attempt(request) in self._refused:
            raise AllBusy
        request.waits = in_line
        room = Headroom.FRESH if in_line else Headroom.HELD
        try:
            return self._picker.pick(self._look(request.model), self._rules, effect.avoid, room)
        except AllBusy:
            if in_line:
                raise
            raise NoWorker from None

    def _attempt(self, request: SimulatedRequest) -> tuple[str, int, str]:
        return request.request, request.attempt, request.instance

    def _connects(self, request: SimulatedRequest, endpoint: Endpoint) -> bool:
        """Return whether a connection to the worker succeeds. In this class, failures show only after sending."""
        return True

    def _begin(self, request: SimulatedRequest, endpoint: Endpoint) -> None:
        state = request.state
        request.sent, request.routed_under = self._breakers.routed(endpoint.key), self._table.number
        request.attempt = 1 if state.last is None else state.last.number + 1
        request.endpoint = endpoint
        endpoint.begin()
        self.requests[request] = None
        self._surroundings.notify("routed", self._frontend, request)
        request.sent_times += 1
        self._send(request)
        if state.move is not None and state.move is not request.reported:
            self._migrated(request, state.move, 5.0)

    def _look(self, model: str) -> Sequence[Endpoint]:
        """Return a model's endpoints, and update the rules by which the filter selects among them."""
        endpoints, rules, surroundings = self._table.models.get(model, ()), self._rules, self._surroundings
        # The own breakers are ignored if less than half of the weight is routable. Fleet verdicts always apply.
        opened = self._breakers.open
        self._ignoring = bool(opened) and routable_share(endpoints, opened, self.links) < PANIC_BELOW
        rules.barred = () if self._ignoring else self._breakers.barred()
        rules.frontends = len(surroundings.linking())
        return endpoints

    def machine(self, request: SimulatedRequest) -> Machine:
        """Return the machine of the worker to which a request was last sent."""
        return self._machines[request.worker]

    # --- at the worker ------------------------------------------------------------------------------------------

    def _send(self, request: SimulatedRequest) -> None:
        machine, kernel, sent = self.machine(request), self._kernel, request.sent_times
        self._refused.discard(self._attempt(request))
        if not machine.runs(request.instance):
            kernel.after(5 * MS, self.failed, request, "cannot_connect", sent)
        elif not machine.reachable(self._name):
            kernel.after(CONNECT_DEADLINE, self.failed, request, "stalled", sent)
        elif machine.draining:
            kernel.after(5 * MS, self.failed, request, "engine_shutdown", sent)
        elif not machine.accept(request):
            kernel.after(5 * MS, self._turned_away, request, sent)
        else:
            self._serve(request, machine)

    def _serve(self, request: SimulatedRequest, machine: Machine) -> None:
        duration = int((0.5 + 8 * self._chance.random()) * machine.condition.slow * SECOND)
        duration = int(duration * (LONGER if self.crowded else 1.0))
        self._kernel.after(min(duration, 60 * SECOND), self._answered, request, request.sent_times)

    def _gone(self, request: SimulatedRequest, sent: int) -> bool:
        """Return whether a request is no longer at the worker of its dispatch number `sent`."""
        return not self.open or request not in self.requests or request.sent_times != sent

    def _leave(self, request: SimulatedRequest) -> None:
        del self.requests[request]
        request.endpoint.end()
        self.machine(request).held.discard(request)
        if self.crowded and self._seams.wakes:
            self._kernel.after(0, self._wake, request.model)

    def _turned_away(self, request: SimulatedRequest, sent: int) -> None:
        """Handle the rejection of a request by a worker without a free slot."""
        if self._gone(request, sent):
            return
        self._refused.add(self._attempt(request))
        self.feed(request, on.AttemptFailed(Failure(FULL, ""), self._progress(request)))

    def _report(self) -> None:
        """Update the load of other frontends at each worker, and retry the queued requests."""
        if not self.open:
            return
        self._kernel.after(REPORT, self._report)
        for name, machine in self._machines.items():
            if machine.reachable(self._name):
                held = machine.held
                self.links.others[name] = Load(running=sum(request not in self.requests for request in held))
        for model in sorted({one.model for one in self._queued}) if self._seams.wakes else ():
            self._wake(model)

    # --- outcomes -----------------------------------------------------------------------------------------------

    def _answered(self, request: SimulatedRequest, sent: int) -> None:
        if self._gone(request, sent):
            return
        machine = self.machine(request)
        if machine.condition.erring or self._chance.random() < machine.condition.flaky:
            self.failed(request, "engine_error")
            return
        self.feed(request, on.FirstToken())
        self.feed(request, on.Finished("stop"))

    def _served(self, request: SimulatedRequest) -> None:
        condition, tally = self.machine(request).condition, self._tally
        tally.served += 1
        tally.altered += bool(condition.corrupt)
        step_s = 0.01 * condition.slow
        before = self._breaker(request)
        endpoint, under, sent = request.endpoint, request.routed_under, request.sent
        self._breakers.served(
            endpoint.key, TOKENS, 5 * step_s, step_s, under, sent, model=endpoint.joined.model
        )
        self._surroundings.notify("judged", self._frontend, request, before, self._breaker(request))

    def _breaker(self, request: SimulatedRequest) -> Breaker:
        return self._breakers.outcomes(request.endpoint.key).breaker

    def _blame(self, request: SimulatedRequest, reason: str) -> None:
        before = self._breaker(request)
        self._breakers.failed(request.endpoint.key, reason, request.routed_under, request.sent)
        self._surroundings.notify("judged", self._frontend, request, before, self._breaker(request))

    def failed(self, request: SimulatedRequest, reason: str, sent: int | None = None) -> None:
        """Fail the current attempt of a request.

        If `sent` is given, the call is ignored unless the request is still at the worker of that dispatch.
        """
        if self._gone(request, request.sent_times if sent is None else sent):
            return
        self._cut(request)
        self.feed(request, on.AttemptFailed(Failure(reason, ""), self._progress(request)))

    def _cut(self, request: SimulatedRequest) -> None:
        """Stop reading tokens of the current attempt."""
        self.feed(request, on.FirstToken())

    def fail_all(self, worker: str, reason: str) -> None:
        """Fail the attempts of all requests at a worker."""
        for request in [f for f in self.requests if f.worker == worker]:
            self.failed(request, reason)

    def absorbed(self) -> None:
        """Make requests leave workers that the journal's new events have taken out of service."""
        for request in list(self.requests):
            endpoint = self._table.endpoints.get(request.endpoint.key)
            if endpoint is None or endpoint.corrupt or endpoint.status is HealthStatus.UNHEALTHY:
                self.unhealthy(endpoint, request)

    def unhealthy(self, endpoint: Endpoint | None, request: SimulatedRequest) -> None:
        """Handle that the worker of a request was taken out of service.

        `endpoint` is None if the worker is no longer known.
        """
        self.failed(request, "unhealthy")

    # --- reports ------------------------------------------------------------------------------------------------

    def _migrated(self, request: SimulatedRequest, move: Move, gap_ms: float) -> None:
        self._tally.migrated += 1
        request.reported, failure = move, move.failure
        source, instance = move.source.key
        self._frontend.outbox.observe(
            RequestMigrated(
                frontend=self._name, request=request.request, model=request.model, source=source, source_instance=instance,
                target=request.worker, target_instance=request.instance, cause=cast(MigrationCause, failure.kind.cause),
                method="reprefill", tokens=move.tokens, gap_ms=gap_ms, attempt=request.attempt, exact=True,
            )
        )  # fmt: skip

    def _abandoned(self, request: SimulatedRequest, reason: str) -> None:
        last = request.state.last
        worker, instance = last.server.key if last is not None else ("", "")
        tokens = self._progress(request).accepted
        self._frontend.outbox.observe(
            RequestAbandoned(
                frontend=self._name, request=request.request, model=request.model, worker=worker, instance=instance,
                reason=reason, tokens=tokens,
            )
        )  # fmt: skip

    def _progress(self, request: SimulatedRequest) -> AnswerProgress:
        tokens = TOKENS_PER_ATTEMPT * (request.attempt - 1)
        return AnswerProgress(tokens, tokens)


class SimulatedFrontend(SimulatedProcess):
    """A host that runs frontend processes, one after another."""

    def __init__(self, name: str, surroundings: Surroundings, underway: type[RequestsUnderWay]) -> None:
        """Create the host. `underway` is the class that simulates the requests of each process."""
        super().__init__(name, surroundings)
        self.lag = 0
        # The requests that found no room at a worker: request, attempt, instance.
        self.refused: set[tuple[str, int, str]] = set()
        own = underway is not RequestsUnderWay  # requests in full draw from a random stream of their own
        self._request_chance = surroundings.kernel.chance(f"{name} requests") if own else self._chance
        self._make_underway, self._demand = underway, surroundings.demand

    def _begin(self) -> None:
        """Start a process, with the state store's fold in most cases, or else from the journal's beginning."""
        surroundings, kernel = self.surroundings, self._kernel
        self.outbox = self._outbox()
        self._arrived = 0
        self.table = surroundings.seams.table()
        self.breakers = LocalBreakers(
            self.name,
            LocalBreakerSettings(),
            FactSettings(window_s=WINDOW_S),
            self.outbox.observe,
            lambda: kernel.now / SECOND,
        )
        self.underway = self._make_underway(self, self._request_chance)
        stored = surroundings.stored() if self._chance.random() < 0.7 else None
        order = surroundings.seams.frontend_order
        self.replica = Replica(self.source, self._broker, self._absorbed, stored, order)
        self.replica.follower.lag = self.lag
        self._later(self._chance.randrange(TICK), self._tick)
        self._later(self._gap(), self._arrive)
        self._later(MINUTE - kernel.now % MINUTE, self._report_traffic, kernel.now // MINUTE)

    def _end(self) -> None:
        """End the process, which breaks the streams of all its requests."""
        self._spool = self.outbox.crash()
        self.replica.close()
        self.underway.close()

    def slow_down(self, lag: int) -> None:
        """Delay the reading of the journal by `lag` microseconds from now on."""
        self.lag = self.replica.follower.lag = lag

    def linked(self, machine: Machine) -> bool:
        """Return whether this frontend recently reported a live connection to a worker."""
        return self.up and self._broker.up and machine.reachable(self.name)

    def broken(self, machine: Machine) -> None:
        """Fail all requests at a worker, because the connection to it is broken."""
        if self.up and self.name not in machine.condition.dark:
            self.underway.fail_all(machine.name, "disconnected")

    def stalled(self, machine: Machine) -> None:
        """Fail all requests at a worker from which no data has arrived for the stall timeout."""
        if self.up and not machine.reachable(self.name):
            self.underway.fail_all(machine.name, "stalled")

    # --- arrivals ---------------------------------------------------------------------------------------------

    def _gap(self) -> int:
        return int(self._chance.expovariate(self._demand.per_second(self._kernel.now)) * SECOND) + MS

    def _arrive(self) -> None:
        self._later(self._gap(), self._arrive)
        self._arrived += 1
        tally, models = self.surroundings.tally, self.surroundings.scenario.models
        tally.requests += 1
        model = models[int(self._chance.random() * len(models))]
        tier = TIERS[int(self._chance.random() * 3)]
        if reason := self._sheds(model, tier):
            self.report_rejected(model, reason, tier)
            return
        self.underway.admit(f"{self.source}-{self._arrived}", model, tier)

    def report_rejected(self, model: str, reason: str, tier: str) -> None:
        """Count and report the rejection of a request."""
        tally = self.surroundings.tally
        tally.rejected += 1
        self.outbox.observe(
            RequestsRejected(frontend=self.name, model=model, count=1, reason=reason, tier=tier)
        )

    def _sheds(self, model: str, tier: str) -> str:
        fleet = self.replica.fleet
        level = fleet.models.get(model)
        if level is None:
            return ""
        if not level.knobs.accept_new:
            return "not_accepting"
        return "capacity_shed" if Tiers().sheds(level.knobs, tier) else ""

    # --- the journal --------------------------------------------------------------------------------------------

    def _absorbed(self, replica: Replica, batch: Sequence[Recorded]) -> None:
        self.surroundings.notify("absorbed", replica, batch)
        for event in batch:
            if isinstance(event.fact, BreakerClosed):
                self.breakers.reset((event.fact.worker, event.fact.instance))
        change = self.table.absorb(replica.fleet)
        if change.joined or change.left:
            self.breakers.keep(self.table.endpoints)
        self.underway.absorbed()

    def _tick(self) -> None:
        """Run the breakers' transitions that are due by time, and report what each worker has served."""
        self._later(TICK, self._tick)
        self.breakers.tick([key for key, endpoint in self.table.endpoints.items() if endpoint.routable])

    def _report_traffic(self, minute: int) -> None:
        """Publish the traffic report of a minute that has ended."""
        self._later(MINUTE, self._report_traffic, minute + 1)
        for fact in self._demand.traffic_reports(self.name, minute):
            self.outbox.observe(fact)
