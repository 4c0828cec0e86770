"""Estimates the work of a request in worker-seconds: reading its prompt, then its batch share.

    work = tokens to be read / prefill rate  +  expected answer x time per token x share of the worker
    share of the worker = 1 / batch, or its share of the KV cache, whichever is more

A worker does one second of work per second. `DrainRate` measures the deviation (prompts are read alongside answers, answers
are longer than expected). Work is not a count of requests: ten short ones may be less work than one long one.
"""

from dataclasses import dataclass
from math import isfinite

from controller.deciders.capacity import tpot_ms
from events.observations import Profile

ANSWER_TOKENS = 512.0  # mean answer length until one has ended; the SLOs assume it too
LEARNS = 0.02  # weight of the next answer in the mean


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
        self._mean[model] = float(tokens) if mean is None else mean + LEARNS * (tokens - mean)

    def expected(self, model: str, most: int) -> float:
        """Return the expected number of tokens of an answer that may have `most`."""
        return min(float(most), self._mean.get(model, ANSWER_TOKENS))

    def known(self, model: str) -> float:
        """Return the mean number of tokens of a model's answers; 0 if none has ended."""
        return self._mean.get(model, 0.0)
