"""The simulated projector and its state store: rows and both positions are committed atomically."""

from collections.abc import Sequence
from random import Random

from controller.deciders.fleet import Fleet
from controller.simulator.world.kernel import MS
from controller.simulator.world.process import SimulatedProcess
from controller.simulator.world.replica import Replica
from controller.simulator.world.seams import Stored
from controller.simulator.world.surroundings import Surroundings
from events.fact import Recorded


class SimulatedProjector(SimulatedProcess):
    """A host that runs projector processes over one state store, which outlives them."""

    def __init__(self, surroundings: Surroundings, chance: Random) -> None:
        super().__init__("projector", surroundings, chance)
        self.stored: Stored | None = None  # the settled fold, its position, and the sources
        self.stored_seq = 0  # sequence that the shown rows include
        self.rows: Fleet | None = None  # as shown to readers
        self.audit: dict[str, int] = {}  # sequence by id; the id is unique
        self._waiting: list[Recorded] = []
        self._committing = False

    def _begin(self) -> None:
        """Start from what is stored."""
        self._waiting, self._committing = [], False
        self.replica = self.surroundings.replica(self.source, self._absorbed, self.stored)

    def _end(self) -> None:
        """End the process. An uncommitted transaction has no effect."""
        self.replica.close()

    def _absorbed(self, replica: Replica, batch: Sequence[Recorded]) -> None:
        self.surroundings.notify("absorbed", replica, batch)
        self._waiting.extend(batch)
        self._commit()

    def _commit(self) -> None:
        """Begin a transaction with everything that has been read."""
        if self._committing or not self._waiting or not self.replica.whole:
            return
        self._committing = True
        rows, self._waiting = self._waiting, []
        delay = MS + int(self._chance.random() * 10 * MS)
        replica = self.replica
        self._later(delay, self._committed, rows, replica.store(), (replica.seq, replica.fleet))

    def _committed(self, events: list[Recorded], stored: Stored, shown: tuple[int, Fleet]) -> None:
        for event in events:
            self.audit.setdefault(event.id, event.seq)
        self.stored, (self.stored_seq, self.rows) = stored, shown
        self._committing = False
        self._commit()
