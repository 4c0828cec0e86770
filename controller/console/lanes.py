"""Timeline lanes of the last ten minutes for the console, one per worker.

A lane is the sequence of a worker's states, each with its start in milliseconds since 1970 by the stream's clock. The share of
the fleet that serves is a sequence of steps in the same form. Only changes are kept, and a limited number of each.
"""

from collections import deque
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TypeVar

from controller.deciders.fleet import Worker
from controller.replay.report.frames import WELL, WorkerShown, shown_of
from controller.replay.report.lanes import millis

OVER = timedelta(minutes=10)
LANES_MAX = 40  # lanes shown
CHANGES_MAX = 40  # per worker; ten times as many for the share
SHARE_EVERY_MS = 500.0  # changes within this time are one step

Lane = tuple[tuple[float, str], ...]
T = TypeVar("T")


class LaneMemory:
    """The latest changes of each worker's state, and of the share of the fleet that serves."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[tuple[float, str]]] = {}
        self._places: dict[
            str, tuple[int, float]
        ] = {}  # of workers that are not spares: GPUs, and how many of them serve
        self._whole, self._serving = 0, 0.0
        self._share: deque[tuple[float, float]] = deque(maxlen=10 * CHANGES_MAX)

    def note(self, at: datetime, name: str, worker: Worker | None) -> None:
        """Record a worker's state at an instant; None: it has left the fleet."""
        if worker is not None:
            self.note_shown(at, name, shown_of(worker))
        elif self._lanes.pop(name, None) is not None and self._place(name, None):
            self._step(millis(at))

    def note_shown(self, at: datetime, name: str, shown: WorkerShown) -> None:
        """Record the displayed state of a worker at an instant."""
        lane, now = self._lanes.get(name), millis(at)
        if lane is None:
            lane = self._lanes[name] = deque(maxlen=CHANGES_MAX)
        if not lane or lane[-1][1] != shown.state:
            lane.append((now, shown.state))
        if self._place(name, None if shown.spare else (shown.gpus, shown.gpus * shown.weight)):
            self._step(now)

    def _place(self, name: str, place: tuple[int, float] | None) -> bool:
        """Set a worker's contribution to the fleet: its GPUs, and how many of them serve. Return whether it has changed."""
        before = self._places.get(name)
        if before == place:
            return False
        if before is not None:
            self._whole, self._serving = self._whole - before[0], self._serving - before[1]
            del self._places[name]
        if place is not None:
            self._whole, self._serving = self._whole + place[0], self._serving + place[1]
            self._places[name] = place
        return True

    def _step(self, now: float) -> None:
        share = round(min(1.0, max(0.0, self._serving / self._whole)), 4) if self._whole else 0.0
        if self._share and now < self._share[-1][0] + SHARE_EVERY_MS:
            self._share[-1] = (self._share[-1][0], share)
        elif not self._share or self._share[-1][1] != share:
            self._share.append((now, share))

    def lanes(self, now: datetime) -> dict[str, Lane]:
        """Return the lanes of workers that were not fully healthy: the latest to change, at most `LANES_MAX`."""
        begin, shown = millis(now - OVER), {}
        for name, lane in self._lanes.items():
            if lane[-1][0] > begin or lane[-1][1] not in WELL:
                since = _since(lane, begin)
                if any(state not in WELL for _, state in since):
                    shown[name] = since
        latest = sorted(shown, key=lambda name: shown[name][-1][0], reverse=True)[:LANES_MAX]
        return {name: shown[name] for name in latest}

    def share(self, now: datetime) -> tuple[tuple[float, float], ...]:
        """Return the steps of the share of the fleet that serves."""
        return _since(self._share, millis(now - OVER))


def _since(steps: Iterable[tuple[float, T]], begin: float) -> tuple[tuple[float, T], ...]:
    """Return the steps that began after `begin`, and the one before them."""
    known = tuple(steps)
    first = next((n for n, (at, _) in enumerate(known) if at > begin), len(known))
    return known[max(0, first - 1) :]
