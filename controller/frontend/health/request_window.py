"""The requests that one worker has served since the last report: counts, times, and how their tokens were drawn."""

from dataclasses import dataclass, field

import msgspec

from events.wire import Sampling

PARAMETERS_MAX = 32  # different sampling parameters that are counted per worker and window


class AnswerDraw(msgspec.Struct, frozen=True):
    """How one answer's tokens were drawn."""

    sampling: Sampling
    weighed: int = 0  # tokens that came with logprobs
    unlikely: int = 0  # of them: below the floor


@dataclass(slots=True)
class Window:
    """What one worker has served since the last report."""

    count: int = 0
    tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)  # each request's mean
    routed_under: int | None = None  # the smallest, so that a straggler is never taken for news
    weighed: int = 0  # tokens with logprobs
    unlikely: int = 0  # of them
    drawn: dict[tuple[float, float, int], int] = field(
        default_factory=dict
    )  # requests by sampling parameters

    def draw(self, drawn: AnswerDraw) -> None:
        """Note how an answer's tokens were drawn, and how many of them were unlikely."""
        self.weighed += drawn.weighed
        self.unlikely += drawn.unlikely
        sampling = drawn.sampling
        how = (sampling.temperature, sampling.top_p, sampling.top_k)
        if "temperature" in sampling.unset:
            return  # it is the server's own default
        if how in self.drawn:
            self.drawn[how] += 1
        elif len(self.drawn) < PARAMETERS_MAX:
            self.drawn[how] = 1
