"""A frontend: it routes by its own late fold and its own breakers, and moves streams that cannot go on where they are.

Its requests are few and long-lived on purpose: what matters here is under which verdict each was sent, and when
which outcome reaches the journal.
"""

from collections.abc import Sequence
from random import Random

from controller.deciders.fleet import Worker
from controller.simulator.broker import Message
from controller.simulator.controllers import Surroundings
from controller.simulator.kernel import MS, SECOND
from controller.simulator.local import LocalBreakers
from controller.simulator.machines import Machine
from controller.simulator.outbox import Outbox
from controller.simulator.replica import Replica
from controller.simulator.traffic import Flight, Traffic, Window
from events.decisions import HealthChanged, HealthStatus
from events.fact import Recorded
from events.observations import (
    MigrationCause,
    RequestAbandoned,
    RequestFailed,
    RequestMigrated,
    RequestsRejected,
    RequestsServed,
    WorkerSlow,
    WorkerSlowCleared,
)

WINDOW = 30 * SECOND
ATTEMPTS_MAX = 4  # migration limit 3
STALL = 450 * MS
CONNECT_DEADLINE = 200 * MS
SLOW_FROM = 3.0
PANIC_BELOW = 0.5
TIERS = ("premium", "standard", "best_effort")


class Frontend:
    """One place that runs frontend processes, one after another."""

    def __init__(self, name: str, around: Surroundings, traffic: Traffic, chance: Random) -> None:
        self.name = name
        self.around = around
        self.traffic = traffic
        self.up = False
        self.life = 0
        self.lag = 0
        self._chance = chance
        self._spool: list[Message] = []

    def start(self) -> None:
        """Start a process, from the state store's rows if there are any, else from the journal's beginning."""
        if self.up:
            return
        around, kernel = self.around, self.around.kernel
        self.life += 1
        self.up = True
        self.flights: dict[str, list[Flight]] = {}
        self.outbox = Outbox(around.broker, f"{self.name}.{self.life}", around.said)
        self.outbox.inherit(self._spool)
        self._spool = []
        self._requests = 0
        self._in_a_row: dict[str, int] = {}
        self._windows: dict[str, Window] = {}
        self._slow: set[str] = set()
        self.local = LocalBreakers(around.policy.breaker, self.name)
        self.replica = Replica(
            f"{self.name}.{self.life}", around.broker, around.network, around.seams, self._absorbed,
            self.traffic.stored() if self._chance.random() < 0.7 else None,
            around.seams.frontend_order,
        )  # fmt: skip
        self.replica.follower.lag = self.lag
        kernel.after(self._chance.randrange(WINDOW), self._report, self.life)
        kernel.after(self._gap(), self._arrive, self.life)

    def crash(self) -> None:
        """End without a word; its streams break with it."""
        if self.up:
            self.up = False
            self._spool = self.outbox.crash()
            self.replica.close()
            self.traffic.tally.lost += sum(map(len, self.flights.values()))

    def slow_down(self, lag: int) -> None:
        """Read the journal this much later from now on."""
        self.lag = self.replica.follower.lag = lag

    def linked(self, machine: Machine) -> bool:
        """Return whether it has said lately that its connection to this worker lives."""
        return self.up and self.around.broker.up and machine.reachable(self.name)

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
        self.around.kernel.after(self._gap(), self._arrive, life)
        self._requests += 1
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
        self._route(f"{self.name}.{self.life}-{self._requests}", model, 1, 0, ())

    def _sheds(self, model: str, tier: str) -> str:
        knobs = self.around.seams.knobs(self.replica.fleet, model)
        if knobs is None:
            return ""
        if not knobs.accept_new:
            return "not_accepting"
        shed = knobs.shed_tier
        return "capacity_shed" if shed is not None and TIERS.index(tier) >= TIERS.index(shed) else ""

    def _route(
        self, request: str, model: str, attempt: int, tokens: int, avoid: tuple[str, ...]
    ) -> Flight | None:
        worker = self._pick(model, avoid)
        if worker is None:
            self.traffic.tally.unserved += 1
            return None
        name, instance = worker.joined.worker, worker.joined.instance
        self.local.took(name, instance, self.around.kernel.instant())
        flight = Flight(
            request,
            model,
            name,
            instance,
            self.replica.fleet.number,
            self.local.moves,
            attempt,
            tokens,
            avoid,
        )
        self.flights.setdefault(name, []).append(flight)
        self.traffic.routed(self, flight)
        self._fly(flight)
        return flight

    def _pick(self, model: str, avoid: tuple[str, ...]) -> Worker | None:
        may = self.around.seams.routable
        mine = [w for w in self.replica.fleet.workers.values() if w.joined.model == model]
        candidates = [w for w in mine if may(w) and w.joined.worker not in avoid]
        now = self.around.kernel.instant()
        admitted = [w for w in candidates if self.local.admits(w.joined.worker, w.joined.instance, now)]
        if sum(w.weight for w in admitted) < PANIC_BELOW * len(mine):
            admitted = candidates  # panic: our own breakers are ignored, never the fleet's verdict
        if not admitted:
            return None
        return self._chance.choices(admitted, [max(w.weight, 0.01) for w in admitted])[0]

    def _fly(self, flight: Flight) -> None:
        machine, kernel = self.traffic.machines[flight.worker], self.around.kernel
        if not machine.up or machine.instance != flight.instance:
            kernel.after(5 * MS, self._failed, self.life, flight, "cannot_connect")
        elif not machine.reachable(self.name):
            kernel.after(CONNECT_DEADLINE, self._failed, self.life, flight, "stalled")
        elif machine.draining:
            kernel.after(5 * MS, self._moved_on, self.life, flight, "engine_shutdown")
        else:
            takes = int((0.5 + 8 * self._chance.random()) * machine.condition.slow * SECOND)
            kernel.after(min(takes, 60 * SECOND), self._landed, self.life, flight)

    # --- outcomes -----------------------------------------------------------------------------------------------

    def _gone(self, life: int, flight: Flight) -> bool:
        return not self.up or self.life != life or flight not in self.flights.get(flight.worker, ())

    def _landed(self, life: int, flight: Flight) -> None:
        if self._gone(life, flight):
            return
        machine = self.traffic.machines[flight.worker]
        if machine.condition.erring or self._chance.random() < machine.condition.flaky:
            self._failed(life, flight, "engine_error")
            return
        self.flights[flight.worker].remove(flight)
        tally = self.traffic.tally
        tally.served += 1
        tally.altered += bool(machine.condition.corrupt)
        self._in_a_row.pop(flight.instance, None)
        self.local.succeeded(flight.worker, flight.instance, flight.own_moves)
        window = self._windows.setdefault(flight.instance, Window())
        window.count += 1
        window.routed_under = flight.routed_under

    def _failed(self, life: int, flight: Flight, cause: MigrationCause) -> None:
        if self._gone(life, flight):
            return
        in_a_row = self._in_a_row.get(flight.instance, 0) + 1
        self._in_a_row[flight.instance] = in_a_row
        self.local.failed(flight.worker, flight.instance, in_a_row, flight.own_moves)
        self.outbox.observe(
            RequestFailed(
                worker=flight.worker,
                instance=flight.instance,
                frontend=self.name,
                failures_in_a_row=in_a_row,
                reason=cause,
                routed_under=flight.routed_under,
            )
        )
        self._moved_on(life, flight, cause)

    def _moved_on(self, life: int, flight: Flight, cause: MigrationCause) -> None:
        if self._gone(life, flight):
            return
        self.flights[flight.worker].remove(flight)
        if flight.attempt >= ATTEMPTS_MAX:
            self.traffic.tally.lost += 1
            self._abandon(flight, "budget_exhausted")
            return
        avoid = (*flight.avoid, flight.worker)
        onward = self._route(flight.request, flight.model, flight.attempt + 1, flight.tokens + 8, avoid)
        if onward is None:
            self._abandon(flight, "no_worker")
            return
        self.traffic.tally.migrated += 1
        self.outbox.observe(
            RequestMigrated(
                frontend=self.name,
                request=flight.request,
                model=flight.model,
                source=flight.worker,
                source_instance=flight.instance,
                target=onward.worker,
                target_instance=onward.instance,
                cause=cause,
                method="reprefill",
                tokens=flight.tokens,
                gap_ms=5.0,
                attempt=onward.attempt,
                exact=True,
            )
        )

    def _abandon(self, flight: Flight, reason: str) -> None:
        self.outbox.observe(
            RequestAbandoned(
                frontend=self.name,
                request=flight.request,
                model=flight.model,
                worker=flight.worker,
                instance=flight.instance,
                reason=reason,
                tokens=flight.tokens,
            )
        )

    def _fail_all(self, worker: str, cause: MigrationCause) -> None:
        for flight in tuple(self.flights.get(worker, ())):
            self._failed(self.life, flight, cause)

    # --- the journal --------------------------------------------------------------------------------------------

    def _absorbed(self, replica: Replica, batch: Sequence[Recorded]) -> None:
        self.around.listen(replica, batch)
        self.local.follow(batch)
        for event in batch:
            fact = event.fact
            if isinstance(fact, HealthChanged) and fact.after in (HealthStatus.UNHEALTHY, HealthStatus.DEAD):
                for flight in tuple(self.flights.get(fact.worker, ())):
                    if flight.instance == fact.instance:
                        self._moved_on(self.life, flight, "unhealthy")

    def _report(self, life: int) -> None:
        """Say what each worker has served since the last report, and who has become slow."""
        if not self.up or self.life != life:
            return
        self.around.kernel.after(WINDOW, self._report, life)
        for name, machine in self.traffic.machines.items():
            window = self._windows.pop(machine.instance, None)
            if window is None:
                continue
            self.outbox.observe(
                RequestsServed(
                    worker=name,
                    instance=machine.instance,
                    frontend=self.name,
                    count=window.count,
                    tokens=window.count * 32,
                    ttft_ms=50.0 * machine.condition.slow,
                    itl_ms=10.0 * machine.condition.slow,
                    routed_under=window.routed_under,
                    window_s=WINDOW / SECOND,
                )
            )
            self._judge_speed(machine)
        self._windows.clear()

    def _judge_speed(self, machine: Machine) -> None:
        slow = machine.condition.slow >= SLOW_FROM
        if not slow and machine.instance not in self._slow:
            return
        kind = WorkerSlow if slow else WorkerSlowCleared
        (self._slow.add if slow else self._slow.discard)(machine.instance)
        self.outbox.observe(
            kind(
                worker=machine.name,
                instance=machine.instance,
                frontend=self.name,
                latency_ms=50.0 * machine.condition.slow,
                baseline_ms=50.0,
            )
        )
