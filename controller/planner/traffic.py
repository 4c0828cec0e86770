"""The traffic of a model, minute by minute, and the work that it causes.

An unknown minute is None, never zero: missing reports of requests do not mean that there are none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controller.deciders.capacity import tpot_ms
from events.observations import Profile

BIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests that arrived within some time, served or not."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    prompt_tokens_squared: float = 0.0  # sum over prompts
    output_tokens: float = 0.0

    @classmethod
    def of(cls, requests: Iterable[tuple[int, int]]) -> "Traffic":
        """Sum up requests, given as (prompt tokens, answer tokens)."""
        count = prompt = squared = output = 0.0
        for asked, answered in requests:
            count += 1
            prompt += asked
            squared += asked * asked
            output += answered
        return cls(count, prompt, squared, output)

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.prompt_tokens_squared + other.prompt_tokens_squared,
            self.output_tokens + other.output_tokens,
        )

    def times(self, factor: float) -> "Traffic":
        """Return the traffic scaled by `factor`."""
        return Traffic(
            self.requests * factor,
            self.prompt_tokens * factor,
            self.prompt_tokens_squared * factor,
            self.output_tokens * factor,
        )


@dataclass(frozen=True, slots=True)
class Minute:
    """One minute of one model."""

    traffic: Traffic
    late: float = 0.0  # answers found within this minute to be late
    workers: float = 0.0  # mean number of serving workers


Seen = Minute | None  # None: unknown


def known(minutes: Sequence[Seen]) -> list[Minute]:
    """Return the known minutes."""
    return [minute for minute in minutes if minute is not None]


def total(minutes: Iterable[Minute]) -> Traffic:
    """Return the total traffic of these minutes."""
    found = Traffic()
    for minute in minutes:
        found = found + minute.traffic
    return found


def work(traffic: Traffic, profile: Profile) -> float:
    """Return the seconds of one worker that the traffic costs: reading the prompts, and each token's share of a full batch."""
    rate, batch = profile.prefill_tokens_per_s, max(1, profile.max_batch)
    reading = traffic.prompt_tokens / rate if rate > 0 else 0.0
    share_ms = tpot_ms(profile, batch) / batch
    return reading + (traffic.output_tokens * share_ms / 1000 if share_ms < 1e6 else 0.0)
