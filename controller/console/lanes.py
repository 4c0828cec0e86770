"""How has it been with whom in the last ten minutes? The picture of a post-mortem, as it goes on.

A lane is a worker's states with the instants at which they began, in milliseconds since 1970 by the stream's clock; so are the
steps of the share of the fleet that serves. Only changes are kept, and few of each.
"""

from collections import deque
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TypeVar

from controller.deciders.fleet import Worker
from controller.replay.report.frames import WELL, WorkerShown, shown_of
from controller.replay.report.lanes import millis

OVER = timedelta(minutes=10)
LANES_MAX = 40  # that are shown
CHANGES_MAX = 40  # of a worker, and of the share ten times as many
SHARE_EVERY_MS = 500.0  # what changes within that is one step

Lane = tuple[tuple[float, str], ...]
T = TypeVar("T")


class LaneMemory:
    """The last changes of each worker's state, and of the share that serves."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[tuple[float, str]]] = {}
        self._places: dict[
            str, tuple[int, float]
        ] = {}  # of workers that are no spares: GPUs, and how many of them serve
        self._whole, self._serving = 0, 0.0
        self._share: deque[tuple[float, float]] = deque(maxlen=10 * CHANGES_MAX)

    def note(self, at: datetime, name: str, worker: Worker | None) -> None:
        """Take in how a worker is at an instant; None: it is no part of the fleet any more."""
        if worker is not None:
            self.note_shown(at, name, shown_of(worker))
        elif self._lanes.pop(name, None) is not None and self._place(name, None):
            self._step(millis(at))

    def note_shown(self, at: datetime, name: str, shown: WorkerShown) -> None:
        """Take in what is shown of a worker at an instant."""
        lane, now = self._lanes.get(name), millis(at)
        if lane is None:
            lane = self._lanes[name] = deque(maxlen=CHANGES_MAX)
        if not lane or lane[-1][1] != shown.state:
            lane.append((now, shown.state))
        if self._place(name, None if shown.spare else (shown.gpus, shown.gpus * shown.weight)):
            self._step(now)

    def _place(self, name: str, place: tuple[int, float] | None) -> bool:
        """Say what a worker adds to the fleet; return whether that is other than before."""
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
        """Return the lanes of workers that were not simply well: those whose state changed last, `LANES_MAX` at most."""
        begin, told = millis(now - OVER), {}
        for name, lane in self._lanes.items():
            if lane[-1][0] > begin or lane[-1][1] not in WELL:
                since = _since(lane, begin)
                if any(state not in WELL for _, state in since):
                    told[name] = since
        latest = sorted(told, key=lambda name: told[name][-1][0], reverse=True)[:LANES_MAX]
        return {name: told[name] for name in latest}

    def share(self, now: datetime) -> tuple[tuple[float, float], ...]:
        """Return the steps of the share that serves."""
        return _since(self._share, millis(now - OVER))


def _since(steps: Iterable[tuple[float, T]], begin: float) -> tuple[tuple[float, T], ...]:
    """Return the steps that began later than `begin`, and the one before them."""
    known = tuple(steps)
    first = next((n for n, (at, _) in enumerate(known) if at > begin), len(known))
    return known[max(0, first - 1) :]
