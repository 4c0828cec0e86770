"""For how long has the state store not shown what the journal held already?"""

from collections import deque

LOOKS_MAX = 1024


class ProjectionAge:
    """Compares where the journal ended at each look with how far the store is. Seconds of a clock that never goes back.

    A planner that has just begun cannot tell for how long what it finds unread has been there. Until the store has once reached
    an end that was seen, that time counts as `before_s` longer.
    """

    def __init__(self, before_s: float) -> None:
        """Begin without having looked."""
        self._before_s = before_s
        self._reached = False  # whether the store has shown an end of the journal that was seen
        # when, and the journal's last sequence
        self._ends: deque[tuple[float, int]] = deque(maxlen=LOOKS_MAX)

    def seen(self, now: float, last: int) -> None:
        """Take in where the journal ends."""
        if not self._ends or last > self._ends[-1][1]:
            self._ends.append((now, last))

    def of(self, shown: int, now: float) -> float:
        """Return for how long what follows `shown` has been on the journal, as far as we have seen; 0: nothing follows it."""
        while self._ends and self._ends[0][1] <= shown:
            self._ends.popleft()
            self._reached = True
        before_s = 0.0 if self._reached else self._before_s
        return now - self._ends[0][0] + before_s if self._ends else 0.0

    def forget(self) -> None:
        """Begin anew: the journal is another one."""
        self._ends.clear()
        self._reached = False
