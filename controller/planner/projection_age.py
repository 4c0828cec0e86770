"""How long the state store has been behind the journal."""

from collections import deque

LOOKS_MAX = 1024


class ProjectionAge:
    """Compares the journal's end at each observation with the store's position. Times are of a monotonic clock.

    A new planner cannot tell how long the unread events have been there. Until the store has reached an observed end of the
    journal, `before_s` is added.
    """

    def __init__(self, before_s: float) -> None:
        """Start without observations. `before_s`: assumed age of what was unread at the start."""
        self._before_s = before_s
        self._reached = False  # the store has reached an observed end of the journal
        # time, and the journal's last sequence
        self._ends: deque[tuple[float, int]] = deque(maxlen=LOOKS_MAX)

    def seen(self, now: float, last: int) -> None:
        """Record the journal's end."""
        if not self._ends or last > self._ends[-1][1]:
            self._ends.append((now, last))

    def of(self, shown: int, now: float) -> float:
        """Return the observed age of the oldest journal event after sequence `shown`; 0 if there is none."""
        while self._ends and self._ends[0][1] <= shown:
            self._ends.popleft()
            self._reached = True
        before_s = 0.0 if self._reached else self._before_s
        return now - self._ends[0][0] + before_s if self._ends else 0.0

    def forget(self) -> None:
        """Reset: the journal was replaced."""
        self._ends.clear()
        self._reached = False
