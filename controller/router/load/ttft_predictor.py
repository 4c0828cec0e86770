"""Predicts a worker's time to first token from its registered profile, corrected by measurements.

    predicted = (tokens ahead of it there + its own) / prefill rate x factor + extra + a step

The factor is learned from prompts that take a while to read. The extra (waiting for the running step, the network) is
learned from short ones, because a factor from a short time would not predict long prompts. Both are exponential means, kept
per worker and for the whole pool; the pool's mean predicts for requests without a worker yet. Each measurement is clamped.
"""

from math import exp, log

import msgspec

LEARNS = 0.1
FACTOR_MAX = 16.0
LONG_S = 0.05  # minimum reading time from which the factor is learned
EXTRA_MAX_S = 1.0


class _Seen(msgspec.Struct):
    """The measurements of one worker, or of the pool."""

    factor_log: float = 0.0
    extra_s: float = 0.0

    def predicted_s(self, reading_s: float) -> float:
        return reading_s * exp(self.factor_log) + self.extra_s

    def learn(self, reading_s: float, took_s: float) -> None:
        """Record a time to first token, without its step, of a prompt with a profiled reading time of `reading_s`."""
        if reading_s >= LONG_S:
            factor = max(0.0, took_s - self.extra_s) / reading_s
            bounded = min(FACTOR_MAX, max(1 / FACTOR_MAX, factor))
            self.factor_log += LEARNS * (log(bounded) - self.factor_log)
        else:
            extra_s = min(EXTRA_MAX_S, max(0.0, took_s - reading_s * exp(self.factor_log)))
            self.extra_s += LEARNS * (extra_s - self.extra_s)


class FirstTokens:
    """Predicts times to first token for one pool's workers."""

    def __init__(self) -> None:
        self._workers: dict[str, _Seen] = {}
        self._all = _Seen()
        self._fastest: float | None = (
            None  # the smallest factor of all workers, cached because each request needs it
        )
        self.ahead_s = 0.0  # mean time to read the tokens ahead of a request when it was sent

    def predicted_s(self, worker: str, ahead_s: float, own_s: float, step_s: float) -> float:
        """Predict the time to first token of a request sent to a worker now. `ahead_s`: time to read the tokens ahead of it."""
        return self._workers.get(worker, self._all).predicted_s(ahead_s + own_s) + step_s

    def usual_s(self, own_s: float, step_s: float) -> float:
        """Predict the time to first token at the next worker that becomes free."""
        return self._all.predicted_s(self.ahead_s + own_s) + step_s

    def alone_s(self, own_s: float, step_s: float) -> float:
        """Predict the time to first token at the fastest worker when it is idle."""
        if (fastest := self._fastest) is None:
            factors = (seen.factor_log for seen in self._workers.values())
            fastest = self._fastest = min(factors, default=self._all.factor_log)
        return own_s * exp(fastest) + step_s

    def sent(self, ahead_s: float) -> None:
        """Record a sent request. `ahead_s`: time to read the tokens ahead of it."""
        self.ahead_s += LEARNS * (ahead_s - self.ahead_s)

    def came(self, worker: str, ahead_s: float, own_s: float, step_s: float, took_s: float) -> None:
        """Record a first token that arrived `took_s` after its request was sent."""
        seen = self._workers.get(worker)
        if seen is None:
            seen = self._workers[worker] = _Seen(self._all.factor_log, self._all.extra_s)
        self._fastest = None
        for one in (self._all, seen):
            one.learn(ahead_s + own_s, took_s - step_s)

    def forget(self, workers: set[str]) -> None:
        """Drop all workers except these."""
        self._workers = {name: seen for name, seen in self._workers.items() if name in workers}
        self._fastest = None
