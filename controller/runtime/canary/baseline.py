"""How long should a canary take? Robust latency baselines, of a worker's own past and of its peers.

A worker is compared with the *median of its peers* (same canary key, same length of answer), where at least
two of them have been heard often enough: when the whole fleet is busy, everybody is slow and nobody is to
blame; when one worker slows down bit by bit, its own slow samples do not move its peers. Alone, it is
compared with its own past, which may rise to at most half above its warm-up: an average that absorbs each
step of a creeping slowdown would never see it (B13). The first sample of an instance is cold (caches,
connections, compilation) and is never kept.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

WINDOW = 20  # samples kept per worker
DRIFT_MAX = 1.5  # how far a lone worker's baseline may rise above its warm-up
SPREADS = 5.0  # how many median absolute deviations above the median are still usual
PEERS_MIN = 2


@dataclass(slots=True)
class _Past:
    """One worker's samples, milliseconds."""

    instance: str
    cold: bool = True  # nothing was measured yet
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    typical: float | None = None  # the median of the recent ones: each probe asks for that of every peer
    warm: float | None = None  # the median of the warm-up
    first: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Baseline:
    """The latencies of the workers that can be compared with one another: one canary key, one length of
    answer."""

    ratio: float = 3.0
    floor_ms: float = 50.0
    warmup: int = 5
    _workers: dict[Hashable, _Past] = field(default_factory=dict)

    def judge(self, worker: Hashable, instance: str, latency_ms: float) -> float | None:
        """Take in one latency; return the baseline that it exceeds by far, or None if it is usual or unknown."""
        past = self._workers.get(worker)
        if past is None or past.instance != instance:
            past = self._workers[worker] = _Past(instance)
        if past.cold:
            past.cold = False
            return None
        usual, spread = self._usual(worker)
        slow = usual is not None and self._exceeds(latency_ms, usual, spread)
        self._keep(past, latency_ms, slow)
        return usual if slow else None

    def of(self, worker: Hashable) -> float | None:
        """Return what a canary should take on this worker, in milliseconds; None while that is unknown."""
        return self._usual(worker)[0]

    def forget(self, workers: Iterable[Hashable]) -> None:
        """Drop workers that are gone: what they did says nothing about those that stay."""
        for worker in workers:
            self._workers.pop(worker, None)

    def _usual(self, worker: Hashable) -> tuple[float | None, float]:
        """Return the baseline and its spread: of the peers, or of the worker's own warm-up."""
        peers = list(self._peers(worker))
        if len(peers) >= PEERS_MIN:
            return median(peers), _deviation(peers)
        past = self._workers.get(worker)
        if past is None or past.warm is None:
            return None, 0.0
        own = min(past.typical, past.warm * DRIFT_MAX) if past.typical is not None else past.warm
        return own, _deviation(past.first)

    def _keep(self, past: _Past, latency_ms: float, slow: bool) -> None:
        if past.warm is None:
            past.first.append(latency_ms)
            if len(past.first) >= self.warmup:
                past.warm = median(past.first)
        if not slow:
            past.recent.append(latency_ms)
            past.typical = median(past.recent)

    def _peers(self, worker: Hashable) -> Iterable[float]:
        for name, past in self._workers.items():
            if name != worker and past.warm is not None and past.typical is not None:
                yield past.typical

    def _exceeds(self, latency_ms: float, usual: float, spread: float) -> bool:
        return latency_ms > max(self.ratio * usual, usual + self.floor_ms, usual + SPREADS * spread)


def _deviation(samples: Sequence[float]) -> float:
    """Return the median absolute deviation: half of the samples are within it of their median."""
    middle = median(samples)
    return median(abs(sample - middle) for sample in samples)
