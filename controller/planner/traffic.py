"""What came to a model, minute by minute, and how much work was it?

A minute of which nobody knows is None and never nothing: that nobody tells of requests does not mean that none come.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controller.deciders.capacity import tpot_ms
from events.observations import Profile

BIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """What came within some time, served or not."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    prompt_tokens_squared: float = 0.0  # each prompt's, added up
    output_tokens: float = 0.0

    @classmethod
    def of(cls, requests: Iterable[tuple[int, int]]) -> "Traffic":
        """Add up requests of so many tokens: prompt and answer."""
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
        """Return as many times of the same requests."""
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
    late: float = 0.0  # answers that began or went on too late, as was seen within this minute
    workers: float = 0.0  # that served, on average


Seen = Minute | None  # None: nobody knows


def known(minutes: Sequence[Seen]) -> list[Minute]:
    """Return the minutes of which anything is known."""
    return [minute for minute in minutes if minute is not None]


def total(minutes: Iterable[Minute]) -> Traffic:
    """Return all that came within these minutes."""
    found = Traffic()
    for minute in minutes:
        found = found + minute.traffic
    return found


def work(traffic: Traffic, profile: Profile) -> float:
    """Return how long one worker with nothing else to do takes for it, in seconds: to read the prompts, and each token's share
    of the steps of a full batch."""
    rate, batch = profile.prefill_tokens_per_s, max(1, profile.max_batch)
    reading = traffic.prompt_tokens / rate if rate > 0 else 0.0
    share_ms = tpot_ms(profile, batch) / batch
    return reading + (traffic.output_tokens * share_ms / 1000 if share_ms < 1e6 else 0.0)
