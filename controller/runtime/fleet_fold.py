"""One process's own fold of the journal, as far as it has read: what every process that follows it begins with."""

from collections.abc import Sequence

from controller.deciders.fleet import Fleet
from events.fact import Recorded
from events.order import Order


class FleetFold:
    """A fold of the fleet that its subclass feeds."""

    def __init__(self, order: Order[Fleet]) -> None:
        self.order = order

    @property
    def fleet(self) -> Fleet:
        """The fleet with everything folded that has been read."""
        return self.order.shown

    @property
    def seq(self) -> int:
        """The sequence of the last event read."""
        return self.order.last_seq

    @property
    def number(self) -> int:
        """The number of the last decision folded: what requests are routed under."""
        return self.order.position.number

    @property
    def whole(self) -> bool:
        """Whether it has read up to what its snapshot had already absorbed."""
        return self.order.last_seq >= self.order.position.decided

    def take(self, batch: Sequence[Recorded]) -> None:
        """Fold a batch in. Raise OutOfOrder on a gap or an event out of turn."""
        take = self.order.take
        for event in batch:
            take(event)
