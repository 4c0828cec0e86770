"""How much of a worker does a request take? Its prompt has to be read, and then it has a place in the batch until its answer
is over.

    work = tokens to be read / prefill rate  +  expected answer x time per token x share of the worker
    share of the worker = 1 / batch, or what it holds of the KV cache, whichever is more

In seconds of a whole worker: what a worker does in a second is one. Where that is not quite so (prompts are read beside answers,
answers are longer than was expected), `DrainRate` has measured it. Nothing here counts requests alone: ten short ones may be less
than one long one.
"""

from dataclasses import dataclass
from math import isfinite

from controller.deciders.capacity import tpot_ms
from events.observations import Profile

ANSWER_TOKENS = 512.0  # of an answer, before any has ended: what the objectives reckon with, too
LEARNS = 0.02  # how much of the next answer goes into the mean


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request asks for. Tokens."""

    unread: float  # of its prompts, cached nowhere
    prompt: float  # of all of its prompts
    answers: int = 1
    answer: float = ANSWER_TOKENS  # of each, as expected


def reading_s(tokens: float, profile: Profile) -> float:
    """Return how long reading so many tokens takes a worker of this profile; 0 where it does not say."""
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
    """How long are a model's answers? A mean of those that have ended, of which the last ones count more."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def ended(self, model: str, tokens: int) -> None:
        """An answer is over."""
        mean = self._mean.get(model)
        self._mean[model] = float(tokens) if mean is None else mean + LEARNS * (tokens - mean)

    def expected(self, model: str, most: int) -> float:
        """Return how many tokens to expect of an answer that may have `most`."""
        return min(float(most), self._mean.get(model, ANSWER_TOKENS))

    def known(self, model: str) -> float:
        """Return how many tokens its answers have had; 0: none has ended."""
        return self._mean.get(model, 0.0)
