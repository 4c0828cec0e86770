"""Estimates of work: of a request in worker-seconds, of its time to first token, of a step's growth.

    work = tokens to be read / prefill rate  +  expected answer x time per token x share of the worker
    share of the worker = 1 / batch, or its share of the KV cache, whichever is more

A worker does one second of work per second. `DrainRate` measures the deviation (prompts are read alongside answers, answers
are longer than expected). Work is not a count of requests: ten short ones may be less work than one long one.
"""

from dataclasses import dataclass
from math import exp, isfinite, log

import msgspec

from controller.deciders.capacity import tpot_ms
from events.observations import Profile

ANSWER_TOKENS = 512.0  # mean answer length until one has ended; the SLOs assume it too
LENGTH_LEARNS = 0.02  # weight of the next answer in the mean
PER_DOUBLING = 1.5  # decoding is memory-bound, so a step's time grows more slowly than its batch
EXPONENT = 0.585  # log2(PER_DOUBLING)
LEARNS = 0.1  # weight of the next measurement of a time to first token
FACTOR_MAX = 16.0
LONG_S = 0.05  # minimum reading time from which the factor is learned
EXTRA_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class Demand:
    """The tokens of one request."""

    unread: float  # of its prompts, not cached anywhere
    prompt: float  # of all of its prompts
    answers: int = 1
    answer: float = ANSWER_TOKENS  # expected tokens of each


def reading_s(tokens: float, profile: Profile) -> float:
    """Return the seconds that a worker of this profile needs to read `tokens`; 0 if it has no prefill rate."""
    rate = profile.prefill_tokens_per_s
    return tokens / rate if rate > 0 else 0.0


def work_s(demand: Demand, profile: Profile, batch: int) -> float:
    """Return the work in seconds of a worker of this profile that runs `batch` requests at once."""
    batch = max(1, batch)
    token_ms = tpot_ms(profile, batch)
    token_s = token_ms / 1000 if isfinite(token_ms) else 0.0
    holds = demand.prompt / max(1, demand.answers) + demand.answer / 2
    cache = profile.kv_blocks * profile.block_tokens
    share = max(1 / batch, min(1.0, holds / cache) if cache > 0 else 0.0)
    return reading_s(demand.unread, profile) + demand.answers * demand.answer * token_s * share


class AnswerLengths:
    """The mean length of each model's answers, recent ones weighted more."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def ended(self, model: str, tokens: int) -> None:
        """Record the length of an answer that has ended."""
        mean = self._mean.get(model)
        self._mean[model] = float(tokens) if mean is None else mean + LENGTH_LEARNS * (tokens - mean)

    def expected(self, model: str, most: int) -> float:
        """Return the expected number of tokens of an answer that may have `most`."""
        return min(float(most), self._mean.get(model, ANSWER_TOKENS))

    def known(self, model: str) -> float:
        """Return the mean number of tokens of a model's answers; 0 if none has ended."""
        return self._mean.get(model, 0.0)


def growth(running: float, compared_with: float) -> float:
    """Return the factor by which a step of `running` sequences may take longer than one of `compared_with`; at least 1."""
    return float(max(1.0, max(1.0, running) / max(1.0, compared_with)) ** EXPONENT)


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
    """Predicts the times to first token of one pool's workers from their profiles, corrected by measurements.

        predicted = (tokens ahead of it there + its own) / prefill rate x factor + extra + a step

    The factor is learned from prompts that take a while to read. The extra (waiting for the running step, the network) is
    learned from short ones, because a factor from a short time would not predict long prompts. Both are exponential means, kept
    per worker and for the whole pool; the pool's mean predicts for requests without a worker yet. Each measurement is clamped.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Seen] = {}
        self._all = _Seen()
        self._fastest: float | None = None  # the smallest factor of all workers, which each request needs
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
        seen = self._workers.setdefault(worker, _Seen(self._all.factor_log, self._all.extra_s))
        self._fastest = None
        for one in (self._all, seen):
            one.learn(ahead_s + own_s, took_s - step_s)

    def forget(self, workers: set[str]) -> None:
        """Drop all workers except these."""
        self._workers = {name: seen for name, seen in self._workers.items() if name in workers}
        self._fastest = None
