"""A frontend: it routes by its own late fold and its own breakers, and moves streams that cannot go on where they are.

Its requests are few and long-lived on purpose: what matters here is under which verdict each was sent, and when
which outcome reaches the journal.
"""

from collections.abc import Sequence
from random import Random

from controller.deciders.degradation import TIERS, sheds
from controller.frontend.outcomes import Outcomes
from controller.frontend.settings import FactSettings, LocalBreakerSettings
from controller.router.pick import NoWorker, Picker, Rules
from controller.router.table import Key, Seat
from controller.simulator.broker import Message
from controller.simulator.controllers import Surroundings
from controller.simulator.kernel import MS, SECOND
from controller.simulator.machines import Machine
from controller.simulator.outbox import Outbox
from controller.simulator.replica import Replica
from controller.simulator.traffic import Flight, Traffic
from events.decisions import BreakerClosed, HealthStatus
from events.fact import Recorded
from events.observations import MigrationCause, RequestAbandoned, RequestMigrated, RequestsRejected

TICK = 2 * SECOND
WINDOW_S = 30.0  # of what is reported
ATTEMPTS_MAX = 4  # migration limit 3
CONNECT_DEADLINE = 200 * MS
PANIC_BELOW = 0.5
CAP = 64  # requests in flight at one worker
TOKENS = 64  # of an answer


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
        self.flights: dict[Flight, None] = {}  # in the order of their arrival
        self.outbox = Outbox(around.broker, f"{self.name}.{self.life}", around.said)
        self.outbox.inherit(self._spool)
        self._spool = []
        self._requests = 0
        self.table = around.seams.table()
        self.outcomes = Outcomes(
            self.name, LocalBreakerSettings(), FactSettings(window_s=WINDOW_S), self.outbox.observe, self._now
        )
        self._picker = Picker()
        self._ignoring = False
        self._rules = Rules(
            lambda worker, instance: True,
            self._allowed,
            lambda worker: None,
            lambda seat: CAP,
            lambda: 1,
            lambda worker, instance: True,
        )
        self.replica = Replica(
            f"{self.name}.{self.life}", around.broker, around.network, around.seams, self._absorbed,
            self.traffic.stored() if self._chance.random() < 0.7 else None,
            around.seams.frontend_order,
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
            self.traffic.tally.lost += len(self.flights)

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
        return "capacity_shed" if sheds(knobs, tier) else ""

    def _route(
        self, request: str, model: str, attempt: int, tokens: int, avoid: tuple[Key, ...]
    ) -> Flight | None:
        seat = self._pick(model, avoid)
        if seat is None:
            self.traffic.tally.unserved += 1
            return None
        sent = self.outcomes.sent(seat.key)
        flight = Flight(request, model, seat, self.table.number, sent, attempt, tokens, avoid)
        seat.active += 1
        self.flights[flight] = None
        self.traffic.routed(self, flight)
        self._fly(flight)
        return flight

    def _pick(self, model: str, avoid: tuple[Key, ...]) -> Seat | None:
        seats = self.table.models.get(model, [])
        self._ignoring = self._panics(seats)
        try:
            return self._picker.pick(seats, self._rules, tried=avoid)
        except NoWorker:
            return None

    def _allowed(self, seat: Seat) -> bool:
        return self._ignoring or self.outcomes.allowed(seat)

    def _panics(self, seats: Sequence[Seat]) -> bool:
        """Our own breakers are ignored where less than half of the weight is routable, never the fleet's verdict."""
        return self.outcomes.any_open and self.outcomes.routable_share(seats) < PANIC_BELOW

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
        return not self.up or self.life != life or flight not in self.flights

    def _leave(self, flight: Flight) -> None:
        del self.flights[flight]
        flight.seat.active -= 1

    def _landed(self, life: int, flight: Flight) -> None:
        if self._gone(life, flight):
            return
        machine = self.traffic.machines[flight.worker]
        if machine.condition.erring or self._chance.random() < machine.condition.flaky:
            self._failed(life, flight, "engine_error")
            return
        self._leave(flight)
        tally = self.traffic.tally
        tally.served += 1
        tally.altered += bool(machine.condition.corrupt)
        step_s = 0.01 * machine.condition.slow
        before = self.outcomes.tally(flight.seat.key).breaker
        seat, under, sent = flight.seat, flight.routed_under, flight.sent
        self.outcomes.served(seat.key, TOKENS, 5 * step_s, step_s, under, sent, model=seat.joined.model)
        self.traffic.judged(self, flight, before, self.outcomes.tally(flight.seat.key).breaker)

    def _failed(self, life: int, flight: Flight, cause: MigrationCause) -> None:
        if not self._gone(life, flight):
            before = self.outcomes.tally(flight.seat.key).breaker
            self.outcomes.failed(flight.seat.key, cause, flight.routed_under, flight.sent)
            self.traffic.judged(self, flight, before, self.outcomes.tally(flight.seat.key).breaker)
            self._moved_on(life, flight, cause)

    def _moved_on(self, life: int, flight: Flight, cause: MigrationCause) -> None:
        if self._gone(life, flight):
            return
        self._leave(flight)
        if flight.attempt >= ATTEMPTS_MAX:
            self.traffic.tally.lost += 1
            self._abandon(flight, "budget_exhausted")
            return
        avoid = (*flight.avoid, flight.seat.key)
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
        for flight in [f for f in self.flights if f.worker == worker]:
            self._failed(self.life, flight, cause)

    # --- the journal --------------------------------------------------------------------------------------------

    def _absorbed(self, replica: Replica, batch: Sequence[Recorded]) -> None:
        self.around.listen(replica, batch)
        for event in batch:
            if isinstance(event.fact, BreakerClosed):
                self.outcomes.reset((event.fact.worker, event.fact.instance))
        change = self.table.absorb(replica.fleet)
        if change.joined or change.left:
            self.outcomes.keep(self.table.seats)
        for flight in list(self.flights):
            seat = self.table.seats.get(flight.seat.key)
            if seat is None or seat.corrupt or seat.status is HealthStatus.UNHEALTHY:
                self._moved_on(self.life, flight, "unhealthy")

    def _tick(self, life: int) -> None:
        """Let the breakers that are due move, and say what each worker has served."""
        if self.up and self.life == life:
            self.around.kernel.after(TICK, self._tick, life)
            self.outcomes.tick([key for key, seat in self.table.seats.items() if seat.routable])

    def _now(self) -> float:
        return self.around.kernel.now / SECOND
