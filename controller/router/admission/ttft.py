"""How long does a worker take to its first token, once it has a request? What it registered, corrected by how it fared.

    predicted = (tokens ahead of it there + its own) / prefill rate x factor + extra + a step

The factor is learned of prompts that take a while to read, the extra (waiting for the step that runs, the network) of those that
do not: a factor of nothing would say nothing of long prompts. Both are means of the last ones, for each worker, and for all of a
pool, by which is reckoned who is not yet anywhere; no single one beyond bounds counts for more.
"""

from math import exp, log

import msgspec

LEARNS = 0.1
FACTOR_MAX = 16.0
LONG_S = 0.05  # reading: who takes less says nothing of the factor
EXTRA_MAX_S = 1.0


class _Seen(msgspec.Struct):
    """What was seen of one worker, or of all."""

    factor_log: float = 0.0
    extra_s: float = 0.0

    def predicted_s(self, reading_s: float) -> float:
        return reading_s * exp(self.factor_log) + self.extra_s

    def learn(self, reading_s: float, took_s: float) -> None:
        """Take in that it took so long, without the step, where reading by the profile takes `reading_s`."""
        if reading_s >= LONG_S:
            factor = max(0.0, took_s - self.extra_s) / reading_s
            bounded = min(FACTOR_MAX, max(1 / FACTOR_MAX, factor))
            self.factor_log += LEARNS * (log(bounded) - self.factor_log)
        else:
            extra_s = min(EXTRA_MAX_S, max(0.0, took_s - reading_s * exp(self.factor_log)))
            self.extra_s += LEARNS * (extra_s - self.extra_s)


class FirstTokens:
    """What is known of the first tokens of one pool's workers."""

    def __init__(self) -> None:
        self._workers: dict[str, _Seen] = {}
        self._all = _Seen()
        self._fastest: float | None = None  # the least factor of all, while it is known: each request asks
        self.ahead_s = 0.0  # how much there was to read before a request, on average, when it was sent

    def predicted_s(self, worker: str, ahead_s: float, own_s: float, step_s: float) -> float:
        """Return how long the first token of a request takes that is sent to a worker now, which has to read before it what takes
        `ahead_s` by its profile."""
        return self._workers.get(worker, self._all).predicted_s(ahead_s + own_s) + step_s

    def usual_s(self, own_s: float, step_s: float) -> float:
        """Return how long it takes at whoever will be free."""
        return self._all.predicted_s(self.ahead_s + own_s) + step_s

    def alone_s(self, own_s: float, step_s: float) -> float:
        """Return how long it takes at the fastest worker, if that has nothing else to do."""
        if (fastest := self._fastest) is None:
            factors = (seen.factor_log for seen in self._workers.values())
            fastest = self._fastest = min(factors, default=self._all.factor_log)
        return own_s * exp(fastest) + step_s

    def sent(self, ahead_s: float) -> None:
        """A request was sent to a worker that had so much to read."""
        self.ahead_s += LEARNS * (ahead_s - self.ahead_s)

    def came(self, worker: str, ahead_s: float, own_s: float, step_s: float, took_s: float) -> None:
        """A first token has come, `took_s` after its request was sent."""
        seen = self._workers.get(worker)
        if seen is None:
            seen = self._workers[worker] = _Seen(self._all.factor_log, self._all.extra_s)
        self._fastest = None
        for one in (self._all, seen):
            one.learn(ahead_s + own_s, took_s - step_s)

    def forget(self, workers: set[str]) -> None:
        """Keep what is known of these workers only."""
        self._workers = {name: seen for name, seen in self._workers.items() if name in workers}
        self._fastest = None
