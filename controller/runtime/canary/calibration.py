"""Calibrates the logprob tolerance from right answers of healthy workers, per canary key. Pure."""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

SAMPLES_MAX = 100  # distances kept per worker
OTHERS_MIN = 2  # other workers needed before one can be an outlier
OUTLIER = 10.0  # a worker's distance, as a multiple of the median of all workers


@dataclass(slots=True)
class Calibration:
    """The logprob tolerance of one canary key: the largest distance of enough healthy samples, times a margin.

    A worker that drifts from the start must not widen the tolerance until its own answers pass. So with three or more workers,
    one that is far from the others does not count.
    """

    fixed: float | None  # the operator's tolerance; None: calibrate
    floor: float
    margin: float
    before: float
    samples_min: int
    _distances: dict[str, deque[float]] = field(default_factory=dict)  # by worker
    _worst: dict[str, float] = field(default_factory=dict)  # the largest distance, by worker
    _samples: int = 0  # in all
    _cached_noise: float | None = None  # the noise; None: it must be computed again

    def add(self, distance: float, worker: str = "") -> None:
        """Add the distance of one probe that passed on a healthy worker."""
        if not math.isfinite(distance):
            return
        distances = self._distances.setdefault(worker, deque(maxlen=SAMPLES_MAX))
        gone = distances[0] if len(distances) == SAMPLES_MAX else None
        distances.append(distance)
        self._samples += gone is None
        worst = self._worst.get(worker, distance)
        worst = max(distances) if gone == worst else max(worst, distance)
        if self._worst.get(worker) != worst:
            self._worst[worker], self._cached_noise = worst, None

    def forget(self, worker: str) -> None:
        """Drop the samples of a worker that is gone."""
        self._samples -= len(self._distances.pop(worker, ()))
        if self._worst.pop(worker, None) is not None:
            self._cached_noise = None

    @property
    def enough(self) -> bool:
        """Whether there are enough samples to calibrate."""
        return self._samples >= self.samples_min

    @property
    def tolerance(self) -> float:
        """The current tolerance; 0.0: compare tokens only."""
        if self.fixed is not None:
            return self.fixed
        if not self.enough:
            return self.before
        return max(self.floor, self._noise() * self.margin)

    def _noise(self) -> float:
        """Return the largest healthy distance, cached: each probe needs it twice, and a fleet of a thousand workers sends dozens
        of probes a second."""
        if self._cached_noise is None:
            self._cached_noise = self._compute_noise()
        return self._cached_noise

    def _compute_noise(self) -> float:
        worst = list(self._worst.values())
        if len(worst) < OTHERS_MIN + 1:
            return max(worst, default=0.0)
        usual = max(median_low(worst), self.floor)
        return max(one for one in worst if one <= usual * OUTLIER)
