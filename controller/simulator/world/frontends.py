"""A frontend: it routes by its own late fold and its own breakers, and moves streams that cannot go on where they are.

Its requests are few and long-lived on purpose: what matters here is under which verdict each was sent, and when
which outcome reaches the journal.
"""

from collections.abc import Sequence
from random import Random

from controller.deciders.tiers import TIERS, Tiers
from controller.frontend.health.local_breakers import LocalBreakers
from controller.frontend.settings import FactSettings, LocalBreakerSettings
from controller.router.endpoints import Endpoint, Key
from controller.router.selection.filter import NoWorker, Picker, Rules
from controller.simulator.world.broker import BrokerMessage
from controller.simulator.world.kernel import MS, SECOND
from controller.simulator.world.machines import Machine
from controller.simulator.world.outbox import SimulatedOutbox
from controller.simulator.world.replica import Replica
from controller.simulator.world.surroundings import Surroundings
from controller.simulator.world.traffic import SimulatedRequest, SimulatedTraffic
from events.decisions import BreakerClosed, HealthStatus
from events.fact import Recorded
from events.observations import MigrationCause, RequestAbandoned, RequestMigrated, RequestsRejected

TICK = 2 * SECOND
WINDOW_S = 30.0  # of what is reported
ATTEMPTS_MAX = 4  # migration limit 3
CONNECT_DEADLINE = 200 * MS
PANIC_BELOW = 0.5
CAP = 64  # requests running at one worker
TOKENS = 64  # of an answer


class SimulatedFrontend:
    """One place that runs frontend processes, one after another."""

    def __init__(
        self, name: str, surroundings: Surroundings, traffic: SimulatedTraffic, chance: Random
    ) -> None:
        self.name = name
        self.surroundings, self._kernel = surroundings, surroundings.kernel
        self.traffic = traffic
        self.up = False
        self.life = 0
        self.lag = 0
        self._chance = chance
        self._spool: list[BrokerMessage] = []

    def start(self) -> None:
        """Start a process, from the state store's rows if there are any, else from the journal's beginning."""
        if self.up:
            return
        surroundings, kernel = self.surroundings, self.surroundings.kernel
        self.life += 1
        self.up = True
        self.requests: dict[SimulatedRequest, None] = {}  # in the order of their arrival
        self.outbox = SimulatedOutbox(
            surroundings.broker, f"{self.name}.{self.life}", surroundings.acknowledged
        )
        self.outbox.inherit(self._spool)
        self._spool = []
        self._arrived = 0
        self.table = surroundings.seams.table()
        self.breakers = LocalBreakers(
            self.name, LocalBreakerSettings(), FactSettings(window_s=WINDOW_S), self.outbox.observe, self._now
        )
        self._picker = Picker()
        self._ignoring = False
        self._rules = Rules(
            lambda worker, instance: True,
            self._allowed,
            lambda worker: None,
            lambda endpoint: CAP,
            lambda: 1,
            lambda worker, instance: True,
        )
        self.replica = Replica(
            f"{self.name}.{self.life}", surroundings.broker, surroundings.network, surroundings.seams, self._absorbed,
            self.traffic.stored() if self._chance.random() < 0.7 else None,
            surroundings.seams.frontend_order,
        )  # fmt: skip
        self.replica.follower.lag = self.lag
        kernel.after(self._chance.randrange(TICK), self._tick, self.life)
        kernel.after(self._gap(), self._arrive, self.life)

    def crash(self) -> None:
        """End without a word; its streams break with it."""
        if self.up:
            self.up = False
            self._spool = self.outbox.crash()
            self.replica.close()
            self.traffic.tally.lost += len(self.requests)

    def slow_down(self, lag: int) -> None:
        """Read the journal `lag` microseconds later from now on."""
        self.lag = self.replica.follower.lag = lag

    def linked(self, machine: Machine) -> bool:
        """Return whether it has said lately that its connection to this worker lives."""
        return self.up and self.surroundings.broker.up and machine.reachable(self.name)

    def broken(self, machine: Machine) -> None:
        """A connection broke: every stream on it fails at once."""
        if self.up and self.name not in machine.condition.dark:
            self._fail_all(machine.name, "disconnected")

    def stalled(self, machine: Machine) -> None:
        """Nothing comes from this worker any more."""
        if self.up and not machine.reachable(self.name):
            self._fail_all(machine.name, "stalled")

    # --- routing ------------------------------------------------------------------------------------------------

    def _gap(self) -> int:
        return int(self._chance.expovariate(self.traffic.per_second) * SECOND) + MS

    def _arrive(self, life: int) -> None:
        if not self.up or self.life != life:
            return
        self._kernel.after(self._gap(), self._arrive, life)
        self._arrived += 1
        tally = self.traffic.tally
        tally.requests += 1
        model = self.traffic.models[int(self._chance.random() * len(self.traffic.models))]
        tier = TIERS[int(self._chance.random() * 3)]
        if reason := self._sheds(model, tier):
            tally.rejected += 1
            self.outbox.observe(
                RequestsRejected(frontend=self.name, model=model, count=1, reason=reason, tier=tier)
            )
            return
        self._route(f"{self.name}.{self.life}-{self._arrived}", model, 1, 0, ())

    def _sheds(self, model: str, tier: str) -> str:
        seams = self.surroundings.seams
        knobs = seams.knobs(self.replica.fleet, model)
        if knobs is None:
            return ""
        if not knobs.accept_new:
            return "not_accepting"
        return "capacity_shed" if Tiers().sheds(knobs, tier) else ""

    def _route(
        self, id: str, model: str, attempt: int, tokens: int, avoid: tuple[Key, ...]
    ) -> SimulatedRequest | None:
        endpoint = self._pick(model, avoid)
        if endpoint is None:
            self.traffic.tally.unserved += 1
            return None
        sent = self.breakers.routed(endpoint.key)
        request = SimulatedRequest(id, model, endpoint, self.table.number, sent, attempt, tokens, avoid)
        endpoint.begin()
        self.requests[request] = None
        self.traffic.routed(self, request)
        self._send(request)
        return request

    def _pick(self, model: str, avoid: tuple[Key, ...]) -> Endpoint | None:
        endpoints = self.table.models.get(model, [])
        self._ignoring = self._panics(endpoints)
        try:
            return self._picker.pick(endpoints, self._rules, tried=avoid)
        except NoWorker:
            return None

    def _allowed(self, endpoint: Endpoint) -> bool:
        return self._ignoring or self.breakers.allowed(endpoint)

    def _panics(self, endpoints: Sequence[Endpoint]) -> bool:
        """Our own breakers are ignored where less than half of the weight is routable, never the fleet's verdict."""
        return self.breakers.any_open and self.breakers.routable_share(endpoints) < PANIC_BELOW

    def _send(self, request: SimulatedRequest) -> None:
        machine, kernel = self.traffic.machines[request.worker], self.surroundings.kernel
        if not machine.up or machine.instance != request.instance:
            kernel.after(5 * MS, self._failed, self.life, request, "cannot_connect")
        elif not machine.reachable(self.name):
            kernel.after(CONNECT_DEADLINE, self._failed, self.life, request, "stalled")
        elif machine.draining:
            kernel.after(5 * MS, self._moved_on, self.life, request, "engine_shutdown")
        else:
            takes = int((0.5 + 8 * self._chance.random()) * machine.condition.slow * SECOND)
            kernel.after(min(takes, 60 * SECOND), self._answered, self.life, request)

    # --- outcomes -----------------------------------------------------------------------------------------------

    def _gone(self, life: int, request: SimulatedRequest) -> bool:
        return not self.up or self.life != life or request not in self.requests

    def _leave(self, request: SimulatedRequest) -> None:
        del self.requests[request]
        request.endpoint.end()

    def _answered(self, life: int, request: SimulatedRequest) -> None:
        if self._gone(life, request):
            return
        machine = self.traffic.machines[request.worker]
        if machine.condition.erring or self._chance.random() < machine.condition.flaky:
            self._failed(life, request, "engine_error")
            return
        self._leave(request)
        tally = self.traffic.tally
        tally.served += 1
        tally.altered += bool(machine.condition.corrupt)
        step_s = 0.01 * machine.condition.slow
        before = self.breakers.outcomes(request.endpoint.key).breaker
        endpoint, under, sent = request.endpoint, request.routed_under, request.sent
        self.breakers.served(
            endpoint.key, TOKENS, 5 * step_s, step_s, under, sent, model=endpoint.joined.model
        )
        self.traffic.judged(self, request, before, self.breakers.outcomes(request.endpoint.key).breaker)

    def _failed(self, life: int, request: SimulatedRequest, cause: MigrationCause) -> None:
        if not self._gone(life, request):
            before = self.breakers.outcomes(request.endpoint.key).breaker
            self.breakers.failed(request.endpoint.key, cause, request.routed_under, request.sent)
            self.traffic.judged(self, request, before, self.breakers.outcomes(request.endpoint.key).breaker)
            self._moved_on(life, request, cause)

    def _moved_on(self, life: int, request: SimulatedRequest, cause: MigrationCause) -> None:
        if self._gone(life, request):
            return
        self._leave(request)
        if request.attempt >= ATTEMPTS_MAX:
            self.traffic.tally.lost += 1
            self._abandon(request, "budget_exhausted")
            return
        avoid = (*request.avoid, request.endpoint.key)
        onward = self._route(request.request, request.model, request.attempt + 1, request.tokens + 8, avoid)
        if onward is None:
            self._abandon(request, "no_worker")
            return
        self.traffic.tally.migrated += 1
        self.outbox.observe(
            RequestMigrated(
                frontend=self.name,
                request=request.request,
                model=request.model,
                source=request.worker,
                source_instance=request.instance,
                target=onward.worker,
                target_instance=onward.instance,
                cause=cause,
                method="reprefill",
                tokens=request.tokens,
                gap_ms=5.0,
                attempt=onward.attempt,
                exact=True,
            )
        )

    def _abandon(self, request: SimulatedRequest, reason: str) -> None:
        self.outbox.observe(
            RequestAbandoned(
                frontend=self.name,
                request=request.request,
                model=request.model,
                worker=request.worker,
                instance=request.instance,
                reason=reason,
                tokens=request.tokens,
            )
        )

    def _fail_all(self, worker: str, cause: MigrationCause) -> None:
        for request in [f for f in self.requests if f.worker == worker]:
            self._failed(self.life, request, cause)

    # --- the journal --------------------------------------------------------------------------------------------

    def _absorbed(self, replica: Replica, batch: Sequence[Recorded]) -> None:
        self.surroundings.listen(replica, batch)
        for event in batch:
            if isinstance(event.fact, BreakerClosed):
                self.breakers.reset((event.fact.worker, event.fact.instance))
        change = self.table.absorb(replica.fleet)
        if change.joined or change.left:
            self.breakers.keep(self.table.endpoints)
        for request in list(self.requests):
            endpoint = self.table.endpoints.get(request.endpoint.key)
            if endpoint is None or endpoint.corrupt or endpoint.status is HealthStatus.UNHEALTHY:
                self._moved_on(self.life, request, "unhealthy")

    def _tick(self, life: int) -> None:
        """Let the breakers that are due move, and say what each worker has served."""
        if self.up and self.life == life:
            self._kernel.after(TICK, self._tick, life)
            self.breakers.tick([key for key, endpoint in self.table.endpoints.items() if endpoint.routable])

    def _now(self) -> float:
        return self.surroundings.kernel.now / SECOND
