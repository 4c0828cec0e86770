"""One frontend process's requests: where each is sent, how it fares there, and where it goes on.

They are few and long-lived on purpose: what matters here is under which verdict each was sent, and when which outcome reaches
the journal.
"""

from collections.abc import Sequence
from random import Random
from typing import Protocol

from controller.deciders.breaker import Breaker
from controller.frontend.health.local_breakers import LocalBreakers, routable_share
from controller.router.endpoints import ConnectedWorkers, Endpoint, EndpointTable, Key
from controller.router.load.active_sequences import ActiveSequences
from controller.router.load.monitor import LoadLimits, LoadMonitor
from controller.router.selection.filter import Headroom, NoWorker, Picker, Rules
from controller.simulator.world.kernel import MS, SECOND
from controller.simulator.world.machines import Machine
from controller.simulator.world.outbox import SimulatedOutbox
from controller.simulator.world.replica import Replica
from controller.simulator.world.requests.traffic import SimulatedRequest, SimulatedTraffic
from controller.simulator.world.surroundings import Surroundings
from events.fact import Observation
from events.observations import MigrationCause, RequestAbandoned, RequestMigrated
from events.wire import Load

ATTEMPTS_MAX = 4  # migration limit 3
CONNECT_DEADLINE = 200 * MS
PANIC_BELOW = 0.5
CAP = 64  # requests running at one worker
TOKENS = 64  # of an answer


class SimulatedLinks(ConnectedWorkers):
    """What a simulated process is told about workers. That one cannot be reached is found out by sending there."""

    def __init__(self) -> None:
        self.others: dict[str, Load] = {}  # what others have at a worker, as far as is known

    def external_load(self, worker: str) -> Load | None:
        """Return what others have at a worker, as far as is known."""
        return self.others.get(worker)


class SendingProcess(Protocol):
    """Whose requests they are."""

    name: str
    traffic: SimulatedTraffic
    surroundings: Surroundings
    table: EndpointTable
    breakers: LocalBreakers
    outbox: SimulatedOutbox
    replica: Replica

    def best_waiting(self, model: str) -> int | None:
        """Return the best tier of which anybody waits for a worker, 0 being the best; None: nobody waits here."""
        ...


class RequestsUnderWay:
    """The requests of one process, until it ends."""

    room = Headroom.FRESH  # that there must be where a request goes

    def __init__(self, frontend: SendingProcess, chance: Random) -> None:
        self.open = True  # the process lives
        self.requests: dict[SimulatedRequest, None] = {}  # in the order of their arrival
        self._frontend, self._chance = frontend, chance
        self._table, self._breakers = frontend.table, frontend.breakers
        self._name, self._traffic = frontend.name, frontend.traffic
        self._surroundings = surroundings = frontend.surroundings
        self._seams, self._kernel = surroundings.seams, surroundings.kernel
        self._picker = Picker()
        self._ignoring = False
        self.links = SimulatedLinks()
        self._rules = Rules(
            self.links, LoadMonitor(*self._limits(), self.links, ActiveSequences(), lambda: 0.0)
        )

    def _limits(self) -> tuple[LoadLimits, EndpointTable]:
        """Return how many requests may be with a worker, and a table that knows the levels which change it."""
        return LoadLimits(CAP), EndpointTable()

    def close(self) -> None:
        """End with the process."""
        self.open = False
        self._traffic.tally.lost += len(self.requests)

    def unanswered(self) -> int:
        """Return how many requests have had no answer yet."""
        return len(self.requests) if self.open else 0

    def best_waiting(self, model: str) -> int | None:
        """Return the best tier of which anybody waits for a worker, 0 being the best; None: nobody waits here."""
        return None

    # --- routing ------------------------------------------------------------------------------------------------

    def take_in(self, id: str, model: str, tier: str) -> None:
        """Serve a request that is let in."""
        self._route(id, model, 1, 0, ())

    def _route(
        self, id: str, model: str, attempt: int, tokens: int, avoid: tuple[Key, ...]
    ) -> SimulatedRequest | None:
        endpoint = self._pick(model, avoid)
        if endpoint is None:
            self._traffic.tally.unserved += 1
            return None
        sent, number = self._breakers.routed(endpoint.key), self._table.number
        request = SimulatedRequest(id, model, endpoint, number, sent, attempt, tokens, avoid)
        self._begin(request)
        return request

    def _begin(self, request: SimulatedRequest) -> None:
        request.endpoint.begin()
        self.requests[request] = None
        self._traffic.routed(self._frontend, request)
        self._send(request)

    def _pick(self, model: str, avoid: tuple[Key, ...]) -> Endpoint | None:
        try:
            return self._picker.pick(self._look(model), self._rules, avoid, self.room)
        except NoWorker:
            return None

    def _look(self, model: str) -> Sequence[Endpoint]:
        """Return a model's endpoints, and bring the filter's rules up to date."""
        endpoints, rules, surroundings = self._table.models.get(model, ()), self._rules, self._surroundings
        self._ignoring = self._panics(endpoints)
        rules.barred = () if self._ignoring else self._breakers.barred()
        rules.frontends = len([*surroundings.frontends()])
        return endpoints

    def _allowed(self, endpoint: Endpoint) -> bool:
        return self._ignoring or self._breakers.allowed(endpoint)

    def _panics(self, endpoints: Sequence[Endpoint]) -> bool:
        """Our own breakers are ignored where less than half of the weight is routable, never the fleet's verdict."""
        opened = self._breakers.open
        return bool(opened) and routable_share(endpoints, opened) < PANIC_BELOW

    def machine(self, request: SimulatedRequest) -> Machine:
        """Return the place where a request is."""
        return self._traffic.machines[request.worker]

    def _send(self, request: SimulatedRequest) -> None:
        machine, kernel = self.machine(request), self._kernel
        if not machine.up or machine.instance != request.instance:
            kernel.after(5 * MS, self._failed, request, "cannot_connect")
        elif not machine.reachable(self._name):
            kernel.after(CONNECT_DEADLINE, self._failed, request, "stalled")
        elif machine.draining:
            kernel.after(5 * MS, self.moved_on, request, "engine_shutdown")
        else:
            kernel.after(min(self._takes(machine), 60 * SECOND), self._answered, request)

    def _takes(self, machine: Machine) -> int:
        """Return how long this worker takes for an answer."""
        return int((0.5 + 8 * self._chance.random()) * machine.condition.slow * SECOND)

    # --- outcomes -----------------------------------------------------------------------------------------------

    def _gone(self, request: SimulatedRequest) -> bool:
        return not self.open or request not in self.requests

    def _leave(self, request: SimulatedRequest) -> None:
        del self.requests[request]
        request.endpoint.end()

    def _answered(self, request: SimulatedRequest) -> None:
        if self._gone(request):
            return
        machine = self.machine(request)
        if machine.condition.erring or self._chance.random() < machine.condition.flaky:
            self._failed(request, "engine_error")
            return
        self._leave(request)
        tally = self._traffic.tally
        tally.served += 1
        tally.altered += bool(machine.condition.corrupt)
        step_s = 0.01 * machine.condition.slow
        before = self._breaker(request)
        endpoint, under, sent = request.endpoint, request.routed_under, request.sent
        self._breakers.served(
            endpoint.key, TOKENS, 5 * step_s, step_s, under, sent, model=endpoint.joined.model
        )
        self._traffic.judged(self._frontend, request, before, self._breaker(request))

    def _breaker(self, request: SimulatedRequest) -> Breaker:
        return self._breakers.outcomes(request.endpoint.key).breaker

    def _failed(self, request: SimulatedRequest, cause: MigrationCause) -> None:
        if not self._gone(request):
            before = self._breaker(request)
            self._breakers.failed(request.endpoint.key, cause, request.routed_under, request.sent)
            self._traffic.judged(self._frontend, request, before, self._breaker(request))
            self.moved_on(request, cause)

    def moved_on(self, request: SimulatedRequest, cause: MigrationCause) -> None:
        """Let a request go on elsewhere."""
        if self._gone(request):
            return
        self._leave(request)
        if request.attempt >= ATTEMPTS_MAX:
            self._traffic.tally.lost += 1
            self._abandon(request, "budget_exhausted")
            return
        avoid = (*request.avoid, request.endpoint.key)
        onward = self._route(request.request, request.model, request.attempt + 1, request.tokens + 8, avoid)
        if onward is None:
            self._abandon(request, "no_worker")
            return
        self._traffic.tally.migrated += 1
        self._observe(
            RequestMigrated(
                frontend=self._name,
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

    def _observe(self, fact: Observation) -> None:
        self._frontend.outbox.observe(fact)

    def _abandon(self, request: SimulatedRequest, reason: str) -> None:
        self._observe(
            RequestAbandoned(
                frontend=self._name,
                request=request.request,
                model=request.model,
                worker=request.worker,
                instance=request.instance,
                reason=reason,
                tokens=request.tokens,
            )
        )

    def fail_all(self, worker: str, cause: MigrationCause) -> None:
        """Nothing that is with a worker can go on there."""
        for request in [f for f in self.requests if f.worker == worker]:
            self._failed(request, cause)
