"""Simulates the projector with its state store, and planner processes with their proposals.

A planner reads only what the projector has committed. If a planner pauses between deciding and sending, its proposal can
arrive after another planner's proposal for the same model. The broker rejects such a late proposal.

The forecast uses no library, so that a seed gives the same result on every machine.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from controller.deciders.fleet import Fleet
from controller.planner.forecast import LoadForecast, constant, forecast, moving_average
from controller.planner.planner import PlannerDuties
from controller.ports import LATEST, PLANNED_BY, Snapshot
from controller.read_model.rows import COLUMNS, worker_row
from controller.simulator.world.kernel import MS, SECOND, KernelClock
from controller.simulator.world.surroundings import Replica, SimulatedProcess, Surroundings
from events.fact import Recorded
from events.observations import ScaleProposed

EVERY = 5 * SECOND
SUPERVISOR = "supervisor"
KINDS = (*PLANNED_BY, *LATEST)


class SimulatedProjector(SimulatedProcess):
    """A host that runs projector processes, one after another. The state store is kept when a process ends."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__("projector", surroundings)
        self.stored_seq = 0  # sequence that the shown rows include
        self.rows: Fleet | None = None  # as shown to readers
        self.audit: dict[str, int] = {}  # sequence by id; the id is unique
        self._waiting: list[Recorded] = []
        self._committing = False

    def _begin(self) -> None:
        """Start a process from the fleet state that the state store contains."""
        self._waiting, self._committing = [], False
        self.replica = Replica(self.source, self._broker, self._absorbed, self.surroundings.stored)

    def _end(self) -> None:
        """End the process. A transaction that is not committed yet has no effect."""
        self.replica.close()

    def _absorbed(self, replica: Replica, batch: Sequence[Recorded]) -> None:
        self.surroundings.notify("absorbed", replica, batch)
        self._waiting.extend(batch)
        self._commit()

    def _commit(self) -> None:
        """Begin a transaction with all events read so far, unless a transaction is running."""
        if self._committing or not self._waiting or not self.replica.whole:
            return
        self._committing = True
        rows, self._waiting = self._waiting, []
        delay = MS + int(self._chance.random() * 10 * MS)
        replica = self.replica
        self._later(delay, self._committed, rows, replica.store(), (replica.seq, replica.fleet))

    def _committed(self, events: list[Recorded], stored: Snapshot, shown: tuple[int, Fleet]) -> None:
        for event in events:
            self.audit.setdefault(event.id, event.seq)
        self.surroundings.stored, (self.stored_seq, self.rows) = stored, shown
        self._committing = False
        self._commit()


@lru_cache(maxsize=256)  # planners repeat the same forecasts
def foresee(history: tuple[float, ...], ahead: int) -> LoadForecast:
    """Return a forecast for the next `ahead` bins (time steps) from the load of the past bins, the latest last.

    Of two methods, constant and moving average, the one that did better in a recent back-test is used. Neither needs a library.
    """
    return forecast(history, ahead, {"constant": constant, "moving_average": moving_average})


class SimulatedPlanner(SimulatedProcess):
    """A host that runs planner processes, one after another."""

    def __init__(self, name: str, surroundings: Surroundings, projector: SimulatedProjector) -> None:
        super().__init__(name, surroundings)
        self.hold = 0  # microseconds of one pause between deciding and sending
        self._projector = projector
        self._clock = KernelClock(surroundings.kernel)

    def _begin(self) -> None:
        """Start a planner without data. The planner then reads the state store."""
        seams, planning = self.surroundings.seams, self.surroundings.scenario.planning
        assert planning is not None
        duties = PlannerDuties(by=SUPERVISOR, lost_after_s=60.0, repeat_s=300.0)
        self.planner = seams.planner(self.name, planning.policy, duties, foresee)
        self.outbox = self._outbox()
        self._later(self._chance.randrange(EVERY), self._tick)

    def _end(self) -> None:
        """End the process, and drop its unsent facts. The next process decides anew from the state store."""
        self.outbox.crash()

    def _tick(self) -> None:
        broker = self._broker
        self._later(EVERY, self._tick)
        if broker.up and not broker.network.drops() and self._projector.rows is not None:
            self._look()

    def _look(self) -> None:
        planner, projector = self.planner, self._projector
        now_s = self._clock.monotonic()
        planner.age.seen(now_s, self._broker.last_seq)
        known = self._broker.events[planner.read : projector.stored_seq]
        planner.take(event for event in known if isinstance(event.fact, KINDS))
        planner.read = max(planner.read, projector.stored_seq)
        assert projector.rows is not None
        workers, names = projector.rows.workers, COLUMNS["workers"]
        rows = [dict(zip(names, worker_row(worker), strict=True)) for worker in workers.values()]
        outlook = planner.look(rows, projector.stored_seq, self._clock.now(), now_s)
        outlook = replace(outlook, proposals=planner.decide(outlook))
        for model, found in planner.capacities(outlook).items():
            if (fact := planner.capacity_fact(model, found, outlook)) is not None:
                self.outbox.observe(fact)
        for _, proposed in planner.due(outlook):
            self.surroundings.notify("proposed", proposed)
            self._propose(proposed, planner.last_proposed(proposed.model))

    def _propose(self, fact: ScaleProposed, after: int) -> None:
        held, self.hold = self.hold, 0
        self._broker.transmit(self._arrive, fact, self.source, after, held=held)

    def _arrive(self, fact: ScaleProposed, source: str, after: int) -> None:
        """Deliver a proposal to the broker, even if its sender has ended meanwhile."""
        broker = self._broker
        if broker.up:
            broker.store_next(fact, source=source, after=after)
