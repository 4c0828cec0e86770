"""One process's own fold of the journal: read late, in batches, from the beginning or from a snapshot."""

from collections.abc import Callable, Sequence

from controller.deciders.fleet import Fleet
from controller.simulator.broker import Broker, Follower, Network
from controller.simulator.seams import Seams, Stored
from events.fact import Recorded
from events.order import Order, Position


class Replica:
    """A fold and the follower that feeds it. `listen` is called after each batch."""

    def __init__(
        self,
        name: str,
        broker: Broker,
        network: Network,
        seams: Seams,
        listen: Callable[["Replica", Sequence[Recorded]], None],
        stored: Stored | None = None,
        order: Callable[..., Order[Fleet]] | None = None,
    ) -> None:
        self.name = name
        fleet, position, sources = stored or (Fleet(), Position(), {})
        self.order: Order[Fleet] = (order or seams.order)(seams.evolve, fleet, position, dict(sources))
        self._listen = listen
        self._seams = seams
        self.follower = Follower(broker, network, position.through, self._take)

    @property
    def fleet(self) -> Fleet:
        """The fleet as this process sees it."""
        return self.order.shown

    @property
    def seq(self) -> int:
        """The last event that this process has read."""
        return self.order.last_seq

    @property
    def whole(self) -> bool:
        """Whether it has read up to what its snapshot had already absorbed."""
        return self.order.last_seq >= self.order.position.decided

    def store(self) -> Stored:
        """Return what a state store keeps of this fold."""
        return self._seams.snapshot(self.order)

    def close(self) -> None:
        """Stop reading."""
        self.follower.close()

    def _take(self, batch: Sequence[Recorded]) -> None:
        absorb = self.order.absorb
        for event in batch:
            absorb(event)
        self._listen(self, batch)
