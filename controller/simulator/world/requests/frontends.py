"""Simulates frontend processes and their requests, with the request state machine of production.

The state machine (`controller.frontend.request.step`) decides the effects for each request. This module simulates the
workers and applies these effects.

Requests are few and long-lived. This suffices to test two things: the fleet state that a frontend had when it sent a request,
and the order in which outcomes reach the journal. Answers have no tokens: the event of a first token comes directly before the
end of an attempt. If no worker is found for a request, the request is abandoned at once. The module `live_requests` simulates
tokens, and requests that wait for a worker.

In a crowd (an overload), each worker accepts a limited number of requests, and further requests are queued until their
timeout. The queue (`controller.frontend.admission.queue`) and the filter for workers with a free slot are production code. A
frontend knows the load of other frontends only from a worker's last report. The frontend therefore sometimes sends a request to
a worker that is already full, and the worker rejects the request. A rejection is not a failure: the request is queued again,
ahead of all other requests. Without a crowd, workers always have free slots and no request is queued.
"""

import itertools
from collections.abc import Sequence
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
FACTS = FactSettings(window_s=30.0)
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
    """The connections of a simulated frontend. All workers count as connected, even those that cannot be reached.

    An unreachable worker is detected only when a request is sent to it.
    """

    def __init__(self) -> None:
        self.others: dict[str, Load] = {}  # by worker: the last known load of other frontends

    def external_load(self, worker: str) -> Load | None:
        """Return the last known load that other frontends cause at a worker; None if this load is unknown."""
        return self.others.get(worker)


class SimulatedFrontend(SimulatedProcess):
    """A host that runs frontend processes, one after another, with their requests.

    A request without an outcome is at a worker, or in the queue.
    """

    def __init__(self, name: str, surroundings: Surroundings) -> None:
        super().__init__(name, surroundings)
        self.lag = 0
        self.crowded = surroundings.scenario.crowd is not None
        # The requests that found no room at a worker: request, attempt, instance.
        self.refused: set[tuple[str, int, str]] = set()
        self._request_chance, self._demand = self._chance, surroundings.demand
        self._seams, self._machines = surroundings.seams, surroundings.machines
        self._tally = surroundings.tally

    def _begin(self) -> None:
        """Start a process, which usually begins with the stored fleet state, and otherwise reads the whole journal."""
        seams, kernel, stored = self._seams, self._kernel, self.surroundings.stored
        self.outbox = self._outbox()
        self._arrived = 0
        self.table, self.links = seams.table(), SimulatedLinks()
        self.breakers = LocalBreakers(
            self.name, LocalBreakerSettings(), FACTS, self.outbox.observe, lambda: kernel.now / SECOND,
            self.links,
        )  # fmt: skip
        self._begin_requests()
        stored = stored if self._chance.random() < 0.7 else None
        self.replica = Replica(self.source, self._broker, self._absorbed, stored, seams.frontend_order)
        self.replica.follower.lag = self.lag
        self._later(self._chance.randrange(TICK), self._tick)
        self._later(self._gap(), self._arrive)
        self._later(MINUTE - kernel.now % MINUTE, self._report_traffic, kernel.now // MINUTE)

    def _begin_requests(self) -> None:
        """Start without requests.

        In an overload scenario (a crowd) or with live requests, this frontend keeps at most one batch of requests at each
        worker. The model's degradation level can require fewer. In other scenarios, the number of requests at a worker is
        practically unlimited.
        """
        self.requests: dict[SimulatedRequest, None] = {}  # at a worker, in order of arrival
        self._in_line: dict[int, SimulatedRequest] = {}  # by number of the queue entry
        self._numbers = itertools.count()
        self._queue = Queue(line=self._seams.lines)
        self._picker, self._ignoring = Picker(), False
        self._none = NoWorker()  # why the last request found no worker
        limits = LoadLimits(inflight_per_batch=1.0) if self.crowded else LoadLimits(CAP)
        levels = self.table if self.crowded else EndpointTable()
        monitor = LoadMonitor(limits, levels, self.links, ActiveSequences(), lambda: 0.0)
        self._rules = Rules(self.links, monitor)
        if self.crowded:
            self._later(self._request_chance.randrange(REPORT), self._report)

    def _end(self) -> None:
        """End the process, and drop all its requests, which count as lost."""
        self._spool = self.outbox.crash()
        self.replica.close()
        self._tally.lost += self.unanswered()
        for request in self.requests:
            self.machine(request).held.discard(request)

    def slow_down(self, lag: int) -> None:
        """From now on, read the journal with an additional delay of `lag` microseconds, if a process is up."""
        if self.up:
            self.lag = self.replica.follower.lag = lag

    def linked(self, machine: Machine) -> bool:
        """Return whether this frontend recently reported a live connection to a worker."""
        return self.up and self._broker.up and machine.reachable(self.name)

    def broken(self, machine: Machine) -> None:
        """Fail all requests at a worker, because the connection to it is broken."""
        if self.up and self.name not in machine.condition.dark:
            self._fail_all(machine.name, "disconnected")

    def stalled(self, machine: Machine) -> None:
        """Fail all requests at a worker from which no data has arrived for the stall timeout."""
        if self.up and not machine.reachable(self.name):
            self._fail_all(machine.name, "stalled")

    # --- arrivals ---------------------------------------------------------------------------------------------

    def _gap(self) -> int:
        return int(self._chance.expovariate(self._demand.per_second(self._kernel.now)) * SECOND) + MS

    def _arrive(self) -> None:
        self._later(self._gap(), self._arrive)
        self._arrived += 1
        models = self.surroundings.scenario.models
        self._tally.requests += 1
        model = models[int(self._chance.random() * len(models))]
        tier = TIERS[int(self._chance.random() * 3)]
        if reason := self._sheds(model, tier):
            self._report_rejected(model, reason, tier)
            return
        self._admit(f"{self.source}-{self._arrived}", model, tier)

    def _report_rejected(self, model: str, reason: str, tier: str) -> None:
        """Count and report the rejection of a request."""
        self._tally.rejected += 1
        fact = RequestsRejected(frontend=self.name, model=model, count=1, reason=reason, tier=tier)
        self.outbox.observe(fact)

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
        self._leave_unhealthy()

    def _tick(self) -> None:
        """Run the breaker transitions that are due, and report what each worker has served."""
        self._later(TICK, self._tick)
        self.breakers.tick([key for key, endpoint in self.table.endpoints.items() if endpoint.routable])

    def _report_traffic(self, minute: int) -> None:
        """Publish the traffic report of a minute that has ended."""
        self._later(MINUTE, self._report_traffic, minute + 1)
        for fact in self._demand.traffic_reports(self.name, minute):
            self.outbox.observe(fact)

    # --- requests ---------------------------------------------------------------------------------------------

    def unanswered(self) -> int:
        """Return the number of requests without an outcome."""
        return len(self.requests) + len(self._in_line)

    def waiting(self) -> list[SimulatedRequest]:
        """Return the queued requests."""
        return [*self._in_line.values()]

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
        endpoint = self.table.endpoints.get((machine.name, machine.instance))
        if endpoint is None or not endpoint.routable or not machine.reachable(self.name) or machine.draining:
            return False
        self._look(machine.model)
        load = self._rules.load
        allowed = self._ignoring or self.breakers.allowed(endpoint)
        return allowed and len(machine.held) < load.cap(endpoint)

    # --- the machine --------------------------------------------------------------------------------------------

    def feed(self, request: SimulatedRequest, event: on.Event) -> None:
        """Pass an event to a request's state machine, and apply the effects."""
        following: on.Event | None = event
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

    def _admit(self, id: str, model: str, tier: str) -> None:
        """Accept a new request.

        In an overload scenario (a crowd) or with live requests, the request is queued. It leaves the queue at once if no other
        request is ahead and a worker has a free slot. In other scenarios, each request is sent at once.
        """
        request = self._new(id, model, tier)
        if not self.crowded:
            self.feed(request, on.Launched())
            return
        self._wait(request, self._request_chance.choice(WAITS) * SECOND)
        since, latest = request.since / SECOND, request.latest / SECOND
        self._push(request, QueuedRequest(model, None, request.rank, self.name, 1.0, since, latest))
        self._wake(model)

    def _wait(self, request: SimulatedRequest, wait: int) -> None:
        request.waits, request.latest = True, self._kernel.now + wait
        self._later(wait, self._expire, request, request.latest)

    def _push(self, request: SimulatedRequest, queued: QueuedRequest) -> None:
        queued.number = next(self._numbers)
        self._in_line[queued.number], request.queued = request, queued
        self._queue.line_of(queued).push(queued)

    def _push_back(self, request: SimulatedRequest) -> None:
        """Queue a request ahead of all others, because its worker had no free slot."""
        if request.queued is not None:
            return
        if not request.waits:
            self._wait(request, REROUTE)
        self._push(request, QueuedRequest(request.model, sent_back=True))
        if self._kernel.now > request.latest:
            self._expire(request, request.latest)

    def _remove(self, request: SimulatedRequest, *, served: bool) -> None:
        if (queued := request.queued) is not None:
            request.queued = None
            del self._in_line[queued.number]
            self._queue.line_of(queued).remove(queued, served=served)

    def _wake(self, model: str) -> None:
        """Send queued requests of a model to workers.

        The requests that a worker had rejected are sent first. Then each queue sends its requests in order. A queue stops when
        it is empty, or when its next request finds all workers busy.
        """
        for queued in self._queue.sent_back(model):
            self._dispatch(self._in_line[queued.number])
        now = self._kernel.now / SECOND
        for line in self._queue.lines(model):
            while (head := line.head(now)) and self._dispatch(self._in_line[head.number]):
                pass

    def _dispatch(self, request: SimulatedRequest) -> bool:
        """Send a queued request, or end the request if no worker exists for it.

        Return False if all workers are busy, and True otherwise.
        """
        begin: dict[str, on.Event] = {"new": on.Launched(), "parked": on.Woken()}
        self.feed(request, begin.get(request.state.phase, on.Resumed()))
        if request.state.phase in ("queued", "parked"):
            return False
        self._remove(request, served=True)
        return True

    def _expire(self, request: SimulatedRequest, latest: int) -> None:
        """End a request that is still queued at its timeout `latest`, in microseconds of virtual time."""
        is_over = request.queued is not None and request.latest == latest
        if not (self._seams.leaves_late and is_over):
            return
        self._remove(request, served=False)
        if request.attempt > 1:
            self._tally.lost += 1
            self._abandoned(request, "no_room")
        else:
            self._report_rejected(request.model, "deadline", request.tier)
        self.feed(request, on.RequestRejected(TOO_LATE))

    def _new(self, id: str, model: str, tier: str) -> SimulatedRequest:
        now = self._kernel.now
        state = RequestState(TERMS, now / SECOND)
        return SimulatedRequest(id, model, state, tier, self.table.urgency(tier), now)

    # --- routing ------------------------------------------------------------------------------------------------

    def _route(self, request: SimulatedRequest, effect: do.SelectWorker) -> on.Event:
        try:
            endpoint = self._pick(request, effect)
        except NoWorker as none:
            self._none = none
            return self._no_worker(request, none)
        if not self._connects(request, endpoint):
            return on.ConnectFailed(endpoint.key)
        self._occupy(request, endpoint)
        return on.Sent(Server(endpoint.key))

    def _no_worker(self, request: SimulatedRequest, none: NoWorker) -> on.NoWorkerFound:
        return on.NoWorkerFound((AllBusy if isinstance(none, AllBusy) else NoWorker).code)

    def _pick(self, request: SimulatedRequest, effect: do.SelectWorker) -> Endpoint:
        """Return the worker for a request.

        A request that is already in progress may exceed this frontend's own limit of requests at the worker.
        """
        in_line = request.queued is not None
        if not in_line and request.sent_times and self._attempt(request) in self.refused:
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
        """Return whether a connection to the worker succeeds. In this class the result is always True.

        This class detects a failed connection only after the request was sent.
        """
        return True

    def _occupy(self, request: SimulatedRequest, endpoint: Endpoint) -> None:
        state = request.state
        request.attempt = 1 if state.last is None else state.last.number + 1
        self._count_at(request, endpoint)
        self.surroundings.notify("routed", self, request)
        request.sent_times += 1
        self._send(request)
        if state.move is not None and state.move is not request.reported:
            self._migrated(request, state.move, 5.0)

    def _count_at(self, request: SimulatedRequest, endpoint: Endpoint) -> None:
        """Count a request at the worker that now serves it."""
        request.sent, request.routed_under = self.breakers.routed(endpoint.key), self.table.number
        request.endpoint = endpoint
        endpoint.begin()
        self.requests[request] = None

    def _look(self, model: str) -> Sequence[Endpoint]:
        """Return a model's endpoints, and update the rules by which an endpoint is chosen for a request.

        The update sets the number of frontends, and which workers the breakers of this frontend bar.
        """
        endpoints, rules, surroundings = self.table.models.get(model, ()), self._rules, self.surroundings
        # The own breakers are ignored if less than half of the weight is routable. Fleet verdicts always apply.
        opened = self.breakers.open
        self._ignoring = bool(opened) and routable_share(endpoints, opened, self.links) < PANIC_BELOW
        rules.barred = () if self._ignoring else self.breakers.barred()
        rules.frontends = len(surroundings.linking())
        return endpoints

    def machine(self, request: SimulatedRequest) -> Machine:
        """Return the machine of the worker to which a request was last sent."""
        return self._machines[request.worker]

    # --- at the worker ------------------------------------------------------------------------------------------

    def _send(self, request: SimulatedRequest) -> None:
        machine, sent = self.machine(request), request.sent_times
        self.refused.discard(self._attempt(request))
        if not machine.runs(request.instance):
            self._later(5 * MS, self.failed, request, "cannot_connect", sent)
        elif not machine.reachable(self.name):
            self._later(CONNECT_DEADLINE, self.failed, request, "stalled", sent)
        elif machine.draining:
            self._later(5 * MS, self.failed, request, "engine_shutdown", sent)
        elif not machine.accept(request):
            self._later(5 * MS, self.failed, request, FULL, sent)
        else:
            self._serve(request, machine)

    def _serve(self, request: SimulatedRequest, machine: Machine) -> None:
        duration = int((0.5 + 8 * self._request_chance.random()) * machine.condition.slow * SECOND)
        duration = int(duration * (LONGER if self.crowded else 1.0))
        self._later(min(duration, 60 * SECOND), self._answered, request, request.sent_times)

    def _gone(self, request: SimulatedRequest, sent: int) -> bool:
        """Return whether a request has left the worker of an attempt. `sent` is the attempt's number, from 1."""
        return request not in self.requests or request.sent_times != sent

    def _leave(self, request: SimulatedRequest) -> None:
        del self.requests[request]
        request.endpoint.end()
        self.machine(request).held.discard(request)
        if self.crowded and self._seams.wakes:
            self._later(0, self._wake, request.model)

    def _report(self) -> None:
        """Read the load that other frontends cause at each reachable worker, and retry the queued requests."""
        self._later(REPORT, self._report)
        for name, machine in self._machines.items():
            if machine.reachable(self.name):
                held = machine.held
                self.links.others[name] = Load(running=sum(request not in self.requests for request in held))
        for model in sorted({one.model for one in self.waiting()}) if self._seams.wakes else ():
            self._wake(model)

    # --- outcomes -----------------------------------------------------------------------------------------------

    def _answered(self, request: SimulatedRequest, sent: int) -> None:
        if self._gone(request, sent):
            return
        machine = self.machine(request)
        if machine.condition.erring or self._request_chance.random() < machine.condition.flaky:
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
        key, under, sent = request.endpoint.key, request.routed_under, request.sent
        self.breakers.served(key, TOKENS, 5 * step_s, step_s, under, sent, model=request.model)
        self.surroundings.notify("judged", self, request, before, self._breaker(request))

    def _breaker(self, request: SimulatedRequest) -> Breaker:
        return self.breakers.outcomes(request.endpoint.key).breaker

    def _blame(self, request: SimulatedRequest, reason: str) -> None:
        before = self._breaker(request)
        self.breakers.failed(request.endpoint.key, reason, request.routed_under, request.sent)
        self.surroundings.notify("judged", self, request, before, self._breaker(request))

    def failed(self, request: SimulatedRequest, reason: str, sent: int | None = None) -> None:
        """Fail the current attempt of a request.

        `sent` is the number of the failed attempt, from 1; None means the last attempt. If the request has already left the
        worker of this attempt, the call has no effect.
        """
        if self._gone(request, request.sent_times if sent is None else sent):
            return
        if reason == FULL:
            self.refused.add(self._attempt(request))
        else:
            self._cut(request)
        self.feed(request, on.AttemptFailed(Failure(reason, ""), self._progress(request)))

    def _cut(self, request: SimulatedRequest) -> None:
        """Stop reading tokens of the current attempt.

        In this class, an attempt has no tokens to read. This method only passes on the event of a first token, which comes
        directly before an attempt ends.
        """
        self.feed(request, on.FirstToken())

    def _fail_all(self, worker: str, reason: str) -> None:
        """Fail the attempts of all requests at a worker."""
        for request in [f for f in self.requests if f.worker == worker]:
            self.failed(request, reason)

    def _leave_unhealthy(self) -> None:
        """Make requests leave workers that the journal's new events have taken out of service."""
        for request in list(self.requests):
            endpoint = self.table.endpoints.get(request.endpoint.key)
            if endpoint is None or endpoint.corrupt or endpoint.status is HealthStatus.UNHEALTHY:
                self.unhealthy(endpoint, request)

    def unhealthy(self, endpoint: Endpoint | None, request: SimulatedRequest) -> None:
        """Fail the current attempt of a request, because the request's worker was taken out of service.

        `endpoint` is that worker, or None if the worker is no longer known.
        """
        self.failed(request, "unhealthy")

    # --- reports ------------------------------------------------------------------------------------------------

    def _migrated(self, request: SimulatedRequest, move: Move, gap_ms: float) -> None:
        self._tally.migrated += 1
        request.reported, failure = move, move.failure
        source, instance = move.source.key
        self.outbox.observe(
            RequestMigrated(
                frontend=self.name, request=request.request, model=request.model, source=source, source_instance=instance,
                target=request.worker, target_instance=request.instance, cause=cast(MigrationCause, failure.kind.cause),
                method="reprefill", tokens=move.tokens, gap_ms=gap_ms, attempt=request.attempt, exact=True,
            )
        )  # fmt: skip

    def _abandoned(self, request: SimulatedRequest, reason: str) -> None:
        last = request.state.last
        worker, instance = last.server.key if last is not None else ("", "")
        tokens = self._progress(request).accepted
        self.outbox.observe(
            RequestAbandoned(
                frontend=self.name, request=request.request, model=request.model, worker=worker, instance=instance,
                reason=reason, tokens=tokens,
            )
        )  # fmt: skip

    def _progress(self, request: SimulatedRequest) -> AnswerProgress:
        tokens = TOKENS_PER_ATTEMPT * (request.attempt - 1)
        return AnswerProgress(tokens, tokens)
