"""The base of every process's fold of the journal."""

from collections.abc import Sequence

from controller.deciders.fleet import Fleet
from events.fact import Recorded
from events.order import Order


class FleetFold:
    """A fold of the fleet; the subclass feeds it events."""

    def __init__(self, order: Order[Fleet]) -> None:
        self.order = order

    @property
    def fleet(self) -> Fleet:
        """The fleet as of the last event read."""
        return self.order.shown

    @property
    def seq(self) -> int:
        """The sequence of the last event read."""
        return self.order.last_seq

    @property
    def number(self) -> int:
        """The number of the last decision folded: frontends record it as `routed_under`."""
        return self.order.position.number

    @property
    def whole(self) -> bool:
        """Whether the fold has read at least up to the last event that its snapshot contains."""
        return self.order.last_seq >= self.order.position.decided

    def take(self, batch: Sequence[Recorded]) -> None:
        """Fold a batch. Raise OutOfOrder on a gap or an event out of order."""
        take = self.order.take
        for event in batch:
            take(event)
