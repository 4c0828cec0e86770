"""Robust baselines of canary latencies, relative to a worker's load, its own past and its peers.

A latency is compared with others at the same load: a server that decodes 60 sequences takes longer for each step than an
idle one, and is not broken. A load level is a power of two of the sequences in the worker's batch. The baseline is, in order:

    peers        the median of the other workers at the same level, if at least two of them were measured often enough
    own past     the worker's own median, capped at 1.5 times its warm-up, so that a gradual slowdown is detected (B13)
    lower level  the baseline of the nearest lower level, times PER_DOUBLING for each level in between

A worker is slow only if its latency also exceeds the last latencies of most peers. If most became slow at once, the cause is
common (an unseen load, a network), and no worker is to blame.

The first sample of an instance is cold (caches, connections, compilation) and is never kept.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

from controller.router.load.work import PER_DOUBLING

WINDOW = 20  # samples kept per worker and level
DRIFT_MAX = 1.5  # limit of a lone worker's baseline, relative to its warm-up
SPREADS = 5.0  # median absolute deviations above the median that still count as normal
PEERS_MIN = 2


@dataclass(slots=True)
class _Past:
    """One worker's samples at one load level, milliseconds."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    typical: float | None = None  # median of the recent samples, cached: each probe reads every peer's
    warm: float | None = None  # the median of the warm-up samples
    first: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Measured:
    """The measurements of one instance of a worker."""

    instance: str
    last: float | None = None  # its last latency, slow or not; None: only the cold sample so far
    levels: dict[int, _Past] = field(default_factory=dict)


@dataclass(slots=True)
class Baseline:
    """The latencies of comparable workers: one canary key, one answer length."""

    ratio: float = 3.0
    floor_ms: float = 50.0
    warmup: int = 5
    _workers: dict[Hashable, _Measured] = field(default_factory=dict)

    def judge(self, worker: Hashable, instance: str, latency_ms: float, load: int = 1) -> float | None:
        """Add one latency at a load of `load` sequences; return the baseline if the latency exceeds it by far, else None."""
        measured = self._workers.get(worker)
        if measured is None or measured.instance != instance:
            self._workers[worker] = _Measured(instance)
            return None
        level = _level(load)
        usual, spread = self._usual(worker, level)
        slow = usual is not None and self._exceeds(latency_ms, usual, spread)
        blamed = slow and not self._common(worker, latency_ms)
        self._keep(measured, level, latency_ms, slow)
        return usual if blamed else None

    def of(self, worker: Hashable, load: int = 1) -> float | None:
        """Return the expected latency of a canary on this worker, in milliseconds; None while that is unknown."""
        return self._usual(worker, _level(load))[0]

    def forget(self, workers: Iterable[Hashable]) -> None:
        """Drop workers that are gone: their latencies must not affect the baselines of the others."""
        for worker in workers:
            self._workers.pop(worker, None)

    def _usual(self, worker: Hashable, level: int) -> tuple[float | None, float]:
        """Return the baseline and its spread, at this level or from the nearest lower one."""
        for lower in range(level, -1, -1):
            usual, spread = self._at(worker, lower)
            if usual is not None:
                growth = PER_DOUBLING ** (level - lower)
                return usual * growth, spread * growth
        return None, 0.0

    def _at(self, worker: Hashable, level: int) -> tuple[float | None, float]:
        """Return the baseline of one level and its spread: from the peers, or from the worker's own warm-up."""
        peers = list(self._peers(worker, level))
        if len(peers) >= PEERS_MIN:
            return median(peers), _deviation(peers)
        measured = self._workers.get(worker)
        past = measured.levels.get(level) if measured is not None else None
        if past is None or past.warm is None:
            return None, 0.0
        own = min(past.typical, past.warm * DRIFT_MAX) if past.typical is not None else past.warm
        return own, _deviation(past.first)

    def _keep(self, measured: _Measured, level: int, latency_ms: float, slow: bool) -> None:
        measured.last = latency_ms
        past = measured.levels.setdefault(level, _Past())
        if past.warm is None:
            past.first.append(latency_ms)
            if len(past.first) >= self.warmup:
                past.warm = median(past.first)
        if not slow:
            past.recent.append(latency_ms)
            past.typical = median(past.recent)

    def _peers(self, worker: Hashable, level: int) -> Iterator[float]:
        for name, measured in self._workers.items():
            past = measured.levels.get(level)
            if name != worker and past is not None and past.warm is not None and past.typical is not None:
                yield past.typical

    def _common(self, worker: Hashable, latency_ms: float) -> bool:
        """Return whether the last latencies of most peers were about as long as this one."""
        last = [m.last for name, m in self._workers.items() if name != worker and m.last is not None]
        return len(last) >= PEERS_MIN and not self._exceeds(latency_ms, median_low(last), 0.0)

    def _exceeds(self, latency_ms: float, usual: float, spread: float) -> bool:
        return latency_ms > max(self.ratio * usual, usual + self.floor_ms, usual + SPREADS * spread)


def _level(load: int) -> int:
    """Return the load level of `load` sequences: 1 for 1, 2 for 2 and 3, 3 for 4 to 7."""
    return max(0, load).bit_length()


def _deviation(samples: Sequence[float]) -> float:
    """Return the median absolute deviation: the median distance of the samples from their median."""
    middle = median(samples)
    return median(abs(sample - middle) for sample in samples)
