"""Estimates the work of a request, its time to first token, and how step time grows with batch size.

    work = tokens to prefill / prefill rate  +  expected answer tokens x time per token x share of the worker
    share of the worker = 1 / batch size, or the request's share of the KV cache, whichever is larger

Work is in seconds of one worker: a worker does one second of work per second. The estimate is inexact, because prompts are
prefilled beside decoding, and answers may be longer than expected. `DrainRate` measures the deviation. Work is not a count of
requests: ten short requests may be less work than one long request.
"""

from dataclasses import dataclass
from math import exp, isfinite, log

import msgspec

from controller.deciders.capacity import tpot_ms
from events.observations import Profile

# mean answer length in tokens until an answer has ended; the SLOs assume the same length
ANSWER_TOKENS = 512.0
LENGTH_LEARNS = 0.02  # weight of each new answer in the mean length
# growth of a step's time per doubling of its batch: below 2, because decoding is memory-bound
PER_DOUBLING = 1.5
EXPONENT = 0.585  # log2(PER_DOUBLING)
LEARNS = 0.1  # weight of each new measurement of a time to first token
FACTOR_MAX = 16.0
LONG_S = 0.05  # shortest prefill time in seconds from which the factor is learned
EXTRA_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class Demand:
    """The token counts of one request, from which its work is estimated."""

    unread: float  # prompt tokens that no worker has cached, over all prompts
    prompt: float  # prompt tokens of all prompts
    answers: int = 1
    answer: float = ANSWER_TOKENS  # expected tokens of each answer


def reading_s(tokens: float, profile: Profile) -> float:
    """Return the seconds that a worker of this profile needs to prefill `tokens`; 0 if it has no prefill rate."""
    rate = profile.prefill_tokens_per_s
    return tokens / rate if rate > 0 else 0.0


def work_s(demand: Demand, profile: Profile, batch: int) -> float:
    """Return the work of a request, in seconds of a worker of this profile that runs `batch` requests at once."""
    batch = max(1, batch)
    token_ms = tpot_ms(profile, batch)
    token_s = token_ms / 1000 if isfinite(token_ms) else 0.0
    holds = demand.prompt / max(1, demand.answers) + demand.answer / 2
    cache = profile.kv_blocks * profile.block_tokens
    share = max(1 / batch, min(1.0, holds / cache) if cache > 0 else 0.0)
    return reading_s(demand.unread, profile) + demand.answers * demand.answer * token_s * share


class AnswerLengths:
    """The mean length of each model's answers in tokens. Recent answers have more weight."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def ended(self, model: str, tokens: int) -> None:
        """Record the length of an answer that has ended."""
        mean = self._mean.get(model)
        self._mean[model] = float(tokens) if mean is None else mean + LENGTH_LEARNS * (tokens - mean)

    def expected(self, model: str, most: int) -> float:
        """Return the expected number of tokens of an answer that may have at most `most` tokens."""
        return min(float(most), self._mean.get(model, ANSWER_TOKENS))

    def known(self, model: str) -> float:
        """Return the mean number of tokens of a model's answers, or 0 if none has ended."""
        return self._mean.get(model, 0.0)


def growth(running: float, compared_with: float) -> float:
    """Return the step time with `running` sequences, divided by that with `compared_with` sequences; at least 1."""
    return float(max(1.0, max(1.0, running) / max(1.0, compared_with)) ** EXPONENT)


class _Seen(msgspec.Struct):
    """The correction learned from the times to first token of one worker, or of the whole pool."""

    factor_log: float = 0.0
    extra_s: float = 0.0

    def predicted_s(self, reading_s: float) -> float:
        return reading_s * exp(self.factor_log) + self.extra_s

    def learn(self, reading_s: float, took_s: float) -> None:
        """Learn from one time to first token.

        `reading_s` is the prefill time by the worker's profile, and `took_s` the measured time without the engine step. Both are
        in seconds.
        """
        if reading_s >= LONG_S:
            factor = max(0.0, took_s - self.extra_s) / reading_s
            bounded = min(FACTOR_MAX, max(1 / FACTOR_MAX, factor))
            self.factor_log += LEARNS * (log(bounded) - self.factor_log)
        else:
            extra_s = min(EXTRA_MAX_S, max(0.0, took_s - reading_s * exp(self.factor_log)))
            self.extra_s += LEARNS * (extra_s - self.extra_s)


class FirstTokens:
    """Predicts the times to first token of a pool's workers from their profiles, corrected by measurements.

    predicted = (tokens ahead of the request at the worker + the request's tokens) / prefill rate x factor + extra + a step

    All times are in seconds. The factor is learned from prompts that take a while to prefill, because a factor learned from a
    short prefill would not predict a long one. The extra time (waiting for the running step, the network) is learned from short
    prompts. Both are exponential means, kept per worker and for the whole pool. If a request has no worker yet, the pool's
    means are used. Each measurement is limited to a range before it is learned.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Seen] = {}
        self._all = _Seen()
        # the smallest factor of all workers; None if it must be computed again
        self._fastest: float | None = None
        self.ahead_s = 0.0  # mean seconds to prefill the tokens ahead of a request when it was sent

    def predicted_s(self, worker: str, ahead_s: float, own_s: float, step_s: float) -> float:
        """Predict the time to first token of a request sent to a worker now.

        `ahead_s` is the time to prefill the prompts ahead of the request, and `own_s` that to prefill the request's own
        prompt. `step_s` is the time of one engine step. All are in seconds.
        """
        return self._workers.get(worker, self._all).predicted_s(ahead_s + own_s) + step_s

    def usual_s(self, own_s: float, step_s: float) -> float:
        """Predict the time to first token of a request that has no worker yet, counted from when it is sent.

        The prompts ahead of the request at the worker are included, at their recent mean. The wait in the frontend's queue
        is excluded. `own_s` is the time to prefill the request's own prompt, and `step_s` that of one engine step. All are
        in seconds.
        """
        return self._all.predicted_s(self.ahead_s + own_s) + step_s

    def alone_s(self, own_s: float, step_s: float) -> float:
        """Predict the time to first token of a request at the fastest worker, if that worker is idle.

        `own_s` is the time to prefill the request's prompt, and `step_s` the time of one engine step, in seconds.
        """
        if (fastest := self._fastest) is None:
            factors = (seen.factor_log for seen in self._workers.values())
            fastest = self._fastest = min(factors, default=self._all.factor_log)
        return own_s * exp(fastest) + step_s

    def sent(self, ahead_s: float) -> None:
        """Record a sent request. `ahead_s` is the time in seconds to prefill the tokens ahead of it."""
        self.ahead_s += LEARNS * (ahead_s - self.ahead_s)

    def came(self, worker: str, ahead_s: float, own_s: float, step_s: float, took_s: float) -> None:
        """Record a first token that arrived `took_s` seconds after its request was sent.

        `ahead_s`, `own_s` and `step_s` are those of the prediction (`predicted_s`).
        """
        seen = self._workers.setdefault(worker, _Seen(self._all.factor_log, self._all.extra_s))
        self._fastest = None
        for one in (self._all, seen):
            one.learn(ahead_s + own_s, took_s - step_s)

    def retain(self, workers: set[str]) -> None:
        """Drop the measurements of all workers that are not in `workers`."""
        self._workers = {name: seen for name, seen in self._workers.items() if name in workers}
        self._fastest = None
