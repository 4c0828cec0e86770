"""How far may a right answer's logprobs be off? Learned from healthy workers, per canary key; pure."""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

SAMPLES_MAX = 100  # distances kept per worker
OTHERS_MIN = 2  # workers that one must be compared with before it can be an outlier
OUTLIER = 10.0  # times the median of all


@dataclass(slots=True)
class Calibration:
    """How far healthy workers of one canary key are apart: the largest distance of enough samples, with a margin.

    A worker that drifts from birth must not stretch the tolerance until it fits itself: where there are three or
    more, one that is far off what the others show does not count.
    """

    fixed: float | None  # the operator's own tolerance; None: calibrate
    floor: float
    margin: float
    before: float
    samples_min: int
    _distances: dict[str, deque[float]] = field(default_factory=dict)  # by worker
    _worst: dict[str, float] = field(default_factory=dict)  # of them
    _samples: int = 0  # in all
    _known: float | None = None  # the noise; None: it is to be reckoned again

    def add(self, distance: float, worker: str = "") -> None:
        """Take in the distance of one probe that passed on a healthy worker."""
        if not math.isfinite(distance):
            return
        distances = self._distances.setdefault(worker, deque(maxlen=SAMPLES_MAX))
        gone = distances[0] if len(distances) == SAMPLES_MAX else None
        distances.append(distance)
        self._samples += gone is None
        worst = self._worst.get(worker, distance)
        worst = max(distances) if gone == worst else max(worst, distance)
        if self._worst.get(worker) != worst:
            self._worst[worker], self._known = worst, None

    def forget(self, worker: str) -> None:
        """Drop what a worker that is gone has shown."""
        self._samples -= len(self._distances.pop(worker, ()))
        if self._worst.pop(worker, None) is not None:
            self._known = None

    @property
    def enough(self) -> bool:
        """Whether there are samples enough to calibrate from."""
        return self._samples >= self.samples_min

    @property
    def tolerance(self) -> float:
        """The tolerance to judge by now; 0.0: compare tokens only."""
        if self.fixed is not None:
            return self.fixed
        if not self.enough:
            return self.before
        return max(self.floor, self._noise() * self.margin)

    def _noise(self) -> float:
        """Return how far they are apart. It is asked for twice a probe, and a fleet of a thousand sends dozens a second."""
        if self._known is None:
            self._known = self._reckoned()
        return self._known

    def _reckoned(self) -> float:
        worst = list(self._worst.values())
        if len(worst) < OTHERS_MIN + 1:
            return max(worst, default=0.0)
        usual = max(median_low(worst), self.floor)
        return max(one for one in worst if one <= usual * OUTLIER)
