"""Whose turn is it among the decisions? The numbers alone, for whoever looks at a journal at which everybody stops.

A decision out of turn stops whoever folds (`events.order.OutOfTurn`), so nobody has folded it, and what follows must have the
number that was next before it. A decision that only a newer version can know has taken a number, or none once it is quarantined:
until one that we know follows, either may be next.
"""

from dataclasses import dataclass

from events.fact import Decision, Recorded, Skipped


@dataclass(slots=True)
class Turns:
    """Counts decisions. Feed it every event, from the first of the stream."""

    last: int | None = 0  # number of the last decision in turn; None: the stream no longer has its beginning
    unread: int = 0  # decisions since, which only a newer version can know

    def expected(self, event: Recorded) -> int | None:
        """Take one event in. Return the number that a decision out of turn should have had; None: everybody passes it, or it
        is no decision."""
        fact = event.fact
        if isinstance(fact, Skipped):
            self.unread += fact.unknown and fact.decided
        elif isinstance(fact, Decision):
            if self.last is not None and not self.last < fact.number <= self.last + 1 + self.unread:
                return self.last + 1
            self.last, self.unread = fact.number, 0
        return None
