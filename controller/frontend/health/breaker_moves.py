"""The journal's record of a frontend's own breaker moves: one event for all moves of a second, bounded."""

from collections.abc import Callable

from controller.router.endpoints import Key
from events.decisions import BreakerPosition
from events.fact import Observation
from events.observations import BreakerMove, FrontendBreakersMoved

MOVES_MAX = (
    200  # in one event: about 30 KB; a fleet whose breakers all move at once must not flood the journal
)


class BreakerMoves:
    """Collects moves until the next report."""

    def __init__(
        self, frontend: str, observe: Callable[[Observation], object], now: Callable[[], float]
    ) -> None:
        self._frontend, self._observe, self._now = frontend, observe, now
        self._moves: list[tuple[float, Key, BreakerPosition, str]] = []
        self._dropped = 0

    def add(self, key: Key, position: BreakerPosition, reason: str = "") -> None:
        """Note one move, or count it as dropped when the next event is full."""
        if len(self._moves) < MOVES_MAX:
            self._moves.append((self._now(), key, position, reason))
        else:
            self._dropped += 1

    def report(self) -> None:
        """Publish what was collected since the last report; nothing if no breaker moved."""
        if not self._moves:
            return
        now = self._now()
        moves = tuple(
            BreakerMove(
                worker=worker,
                instance=instance,
                position=position,
                ago_ms=round((now - at) * 1000, 1),
                reason=reason,
            )
            for at, (worker, instance), position, reason in self._moves
        )
        dropped, self._moves, self._dropped = self._dropped, [], 0
        self._observe(FrontendBreakersMoved(frontend=self._frontend, moves=moves, dropped=dropped))
