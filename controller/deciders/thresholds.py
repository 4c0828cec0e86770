"""The load thresholds above which a data-parallel rank of a model counts as busy. Operators set them.

The thresholds are on the journal so that all frontends use the same values. No decider uses them. Each frontend compares
them with the load that it observes.
"""

from dataclasses import asdict, dataclass, replace
from math import isfinite

from events.observations import BusyThresholdsSet


@dataclass(frozen=True, slots=True)
class BusyThresholds:
    """The load at which a data-parallel rank counts as busy.

    If a threshold is None, that measure of load is ignored.
    """

    active_decode_blocks: float | None = None  # share of its KV blocks, 0 to 1
    active_prefill_tokens: int | None = None
    active_prefill_tokens_frac: float | None = None  # share of the tokens of one step

    def __post_init__(self) -> None:
        """Raise ValueError if a threshold is out of its valid range.

        The message names the threshold, its value, and the range.
        """
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
        """Return these thresholds, with the value from `below` for each threshold that is None."""
        return replace(below, **{name: value for name, value in asdict(self).items() if value is not None})


NEVER = BusyThresholds()


def evolve(state: BusyThresholds, fact: BusyThresholdsSet) -> BusyThresholds:
    """Return the thresholds after an operator's change. Thresholds that the change does not set keep their values.

    A change with an invalid value is ignored. No frontend sends such a change.
    """
    try:
        new = BusyThresholds(
            fact.active_decode_blocks, fact.active_prefill_tokens, fact.active_prefill_tokens_frac
        )
    except ValueError:
        return state
    return new.over(state)
