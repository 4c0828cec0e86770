"""A simulated frontend: routes by its own, late fold and its breakers, and migrates failed streams."""

from collections.abc import Callable, Sequence
from random import Random

from controller.deciders.tiers import TIERS, Tiers
from controller.frontend.health.local_breakers import LocalBreakers
from controller.frontend.settings import FactSettings, LocalBreakerSettings
from controller.simulator.world.kernel import MINUTE, MS, SECOND
from controller.simulator.world.machines import Machine
from controller.simulator.world.process import SimulatedProcess
from controller.simulator.world.replica import Replica
from controller.simulator.world.requests.request_driver import RequestsUnderWay
from controller.simulator.world.requests.traffic import SimulatedTraffic
from controller.simulator.world.surroundings import Surroundings
from events.decisions import BreakerClosed
from events.fact import Recorded
from events.observations import RequestsRejected

TICK = 2 * SECOND
WINDOW_S = 30.0  # seconds of a reporting window


class SimulatedFrontend(SimulatedProcess):
    """A host that runs frontend processes, one after another."""

    def __init__(
        self,
        name: str,
        surroundings: Surroundings,
        traffic: SimulatedTraffic,
        chance: Random,
        underway: Callable[["SimulatedFrontend", Random], RequestsUnderWay],
        request_chance: Random,
    ) -> None:
        """Set up the host. `underway` creates the request handling of a process, with `request_chance` as its random stream."""
        super().__init__(name, surroundings, chance)
        self.traffic = traffic
        self.lag = 0
        self._make_underway, self._request_chance = underway, request_chance

    def _begin(self) -> None:
        """Start from the state store's rows if there are any, else from the journal's beginning."""
        surroundings, kernel = self.surroundings, self._kernel
        self.outbox = self._outbox()
        self._arrived = 0
        self.table = surroundings.seams.table()
        self.breakers = LocalBreakers(
            self.name, LocalBreakerSettings(), FactSettings(window_s=WINDOW_S), self.outbox.observe, self._now
        )
        self.underway = self._make_underway(self, self._request_chance)
        stored = self.traffic.stored() if self._chance.random() < 0.7 else None
        order = surroundings.seams.frontend_order
        self.replica = surroundings.replica(self.source, self._absorbed, stored, order)
        self.replica.follower.lag = self.lag
        self._later(self._chance.randrange(TICK), self._tick)
        self._later(self._gap(), self._arrive)
        self._later(MINUTE - kernel.now % MINUTE, self._report_traffic, kernel.now // MINUTE)

    def _end(self) -> None:
        """End the process, which breaks its streams."""
        self._spool = self.outbox.crash()
        self.replica.close()
        self.underway.close()

    def slow_down(self, lag: int) -> None:
        """Read the journal `lag` microseconds late from now on."""
        self.lag = self.replica.follower.lag = lag

    def linked(self, machine: Machine) -> bool:
        """Return whether this frontend recently reported a live connection to a worker."""
        return self.up and self.surroundings.broker.up and machine.reachable(self.name)

    def broken(self, machine: Machine) -> None:
        """Handle a broken connection: every stream on it fails at once."""
        if self.up and self.name not in machine.condition.dark:
            self.underway.fail_all(machine.name, "disconnected")

    def stalled(self, machine: Machine) -> None:
        """Handle a worker from which no data arrives any more."""
        if self.up and not machine.reachable(self.name):
            self.underway.fail_all(machine.name, "stalled")

    def best_waiting(self, model: str) -> int | None:
        """Return the best tier among the queued requests, 0 being the best; None if none is queued."""
        return self.underway.best_waiting(model)

    # --- arrivals ---------------------------------------------------------------------------------------------

    def _gap(self) -> int:
        return int(self._chance.expovariate(self.traffic.per_second(self._kernel.now)) * SECOND) + MS

    def _arrive(self) -> None:
        self._later(self._gap(), self._arrive)
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
        self.underway.admit(f"{self.source}-{self._arrived}", model, tier)

    def _sheds(self, model: str, tier: str) -> str:
        seams = self.surroundings.seams
        knobs = seams.knobs(self.replica.fleet, model)
        if knobs is None:
            return ""
        if not knobs.accept_new:
            return "not_accepting"
        return "capacity_shed" if Tiers().sheds(knobs, tier) else ""

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
        """Move the breakers that are due, and report what each worker has served."""
        self._later(TICK, self._tick)
        self.breakers.tick([key for key, endpoint in self.table.endpoints.items() if endpoint.routable])

    def _report_traffic(self, minute: int) -> None:
        """Report the traffic of the minute that has ended."""
        self._later(MINUTE, self._report_traffic, minute + 1)
        for fact in self.traffic.traffic_reports(self.name, minute):
            self.outbox.observe(fact)

    def _now(self) -> float:
        return self._kernel.now / SECOND
