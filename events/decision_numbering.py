"""Checks the numbering of decisions without folding them.

It is used to inspect a journal at which every reader stops. A decision out of turn stops every fold (`events.order.OutOfTurn`).
Such a decision has not been folded, so the next one must have the number that was expected of it. A decision that only a newer
version can know has used a number (none, once it is quarantined). Until a known decision follows, either number may be next.
"""

from dataclasses import dataclass

from events.fact import Decision, Recorded, Skipped


@dataclass(slots=True)
class DecisionNumbering:
    """Counts decisions. Feed it every event, from the first of the stream."""

    last: int | None = 0  # number of the last decision in turn; None: the stream no longer has its beginning
    unread: int = 0  # later decisions that only a newer version can know

    def expected(self, event: Recorded) -> int | None:
        """Add one event. Return the number that a decision out of turn should have had; None: it is in turn, or is no
        decision."""
        fact = event.fact
        if isinstance(fact, Skipped):
            self.unread += fact.unknown and fact.decided
        elif isinstance(fact, Decision):
            if self.last is not None and not self.last < fact.number <= self.last + 1 + self.unread:
                return self.last + 1
            self.last, self.unread = fact.number, 0
        return None
