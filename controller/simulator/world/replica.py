"""One process's own fold of the journal, read in late batches, from the beginning or a snapshot.

Ten processes fold the same facts in the same order. The fold is a pure function, so `Remembered` caches the result of each
step for all of them. The watch folds everything once more without that cache, and compares.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from controller.deciders.fleet import Fleet
from controller.runtime.initial_fold import FleetFold
from controller.simulator.world.broker import Broker, Follower
from controller.simulator.world.seams import Seams, Stored
from events.fact import Recorded
from events.order import Order, Position

NOTHING = Fleet()
Listen: TypeAlias = Callable[["Replica", Sequence[Recorded]], None]
STEPS_MAX = 100_000  # cached steps of the fold


class Remembered:
    """A fold that computes each step only once for all processes."""

    def __init__(self, evolve: Callable[[Fleet, Recorded], Fleet]) -> None:
        self._evolve = evolve
        # Keyed by the identity of objects that the values keep alive.
        self._steps: dict[tuple[int, int], tuple[Fleet, Recorded, Fleet]] = {}

    def __call__(self, fleet: Fleet, recorded: Recorded) -> Fleet:
        """Return the fleet after this event."""
        key = (id(fleet), id(recorded))
        known = self._steps.get(key)
        if known is not None:
            return known[2]
        if len(self._steps) >= STEPS_MAX:
            self._steps.clear()
        after = self._evolve(fleet, recorded)
        self._steps[key] = (fleet, recorded, after)
        return after


class Replica(FleetFold):
    """A fold and the follower that feeds it. `listen` is called after each batch."""

    def __init__(
        self,
        name: str,
        broker: Broker,
        seams: Seams,
        listen: Listen,
        stored: Stored | None = None,
        order: Callable[..., Order[Fleet]] | None = None,
    ) -> None:
        self.name = name
        fleet, position, sources = stored or (NOTHING, Position(), {})
        super().__init__((order or seams.order)(seams.evolve, fleet, position, dict(sources)))
        self._listen = listen
        self._seams = seams
        self.follower = Follower(broker, position.through, self._read)

    @property
    def known(self) -> int:
        """The sequence up to which this fold contains all decisions; it may not have read all events in its snapshot."""
        return max(self.seq, self.order.position.decided)

    def store(self) -> Stored:
        """Return the part of this fold that a state store keeps."""
        return self._seams.snapshot(self.order)

    def close(self) -> None:
        """Stop reading."""
        self.follower.close()

    def _read(self, batch: Sequence[Recorded]) -> None:
        self.take(batch)
        self._listen(self, batch)
