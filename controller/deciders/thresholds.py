"""From where on is a worker of a model busy? What operators have set at any frontend, on the journal, so that all of them agree.

The deciders decide nothing by it: a frontend looks at its own load, and at these.
"""

from dataclasses import dataclass
from math import isfinite

from events.observations import BusyThresholdsSet


@dataclass(frozen=True, slots=True)
class BusyThresholds:
    """From where on a DP rank is busy; None: never, for this reason."""

    active_decode_blocks: float | None = None  # share of its KV blocks, 0 to 1
    active_prefill_tokens: int | None = None
    active_prefill_tokens_frac: float | None = None  # of the tokens of one step

    def __post_init__(self) -> None:
        """Raise ValueError, which names the threshold, its value, and what it must be."""
        share, tokens = self.active_decode_blocks, self.active_prefill_tokens
        frac = self.active_prefill_tokens_frac
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"active_decode_blocks_threshold must be between 0.0 and 1.0, got {share}")
        if tokens is not None and tokens < 0:
            raise ValueError(f"active_prefill_tokens_threshold must be 0 or more, got {tokens}")
        if frac is not None and not (isfinite(frac) and frac >= 0):
            raise ValueError(
                f"active_prefill_tokens_threshold_frac must be a finite number from 0 up, got {frac}"
            )

    def __bool__(self) -> bool:
        return self != NEVER

    def over(self, below: "BusyThresholds") -> "BusyThresholds":
        """Return these, and for what they leave open those `below`."""

        def first(own: float | None, other: float | None) -> float | None:
            return other if own is None else own

        tokens = self.active_prefill_tokens
        return BusyThresholds(
            first(self.active_decode_blocks, below.active_decode_blocks),
            below.active_prefill_tokens if tokens is None else tokens,
            first(self.active_prefill_tokens_frac, below.active_prefill_tokens_frac),
        )


NEVER = BusyThresholds()


def evolve(state: BusyThresholds, fact: BusyThresholdsSet) -> BusyThresholds:
    """Absorb what an operator has set: what it leaves open stays. What makes no sense changes nothing: no frontend says it."""
    try:
        said = BusyThresholds(
            fact.active_decode_blocks, fact.active_prefill_tokens, fact.active_prefill_tokens_frac
        )
    except ValueError:
        return state
    return said.over(state)
