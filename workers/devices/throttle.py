"""How much slower is a throttled GPU than its peers, and when is that worth a fact?

    calm ── throttled for hold_s ──▶ said (weight) ── a step of dead_band ──▶ said (another weight)
      ▲                                  └── not throttled for hold_s ──▶ cleared ─┐
      └────────────────────────────────────────────────────────────────────────────┘

The weight is clamp(clock / median of the peers' clocks, 0.1, 1). Short dips are normal, and a weight that trembles would
move traffic to and fro: hence the wait and the dead band.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

WEIGHT_MIN = 0.1  # a slow worker is still a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottlePolicy:
    """When a throttled clock is worth a fact."""

    hold_s: float = 10.0
    dead_band: float = 0.1  # of the full weight


@dataclass(frozen=True, slots=True)
class Throttle:
    """One GPU's throttling. Times are of the watch's own clock, in seconds."""

    throttled: bool = False
    since: float = 0.0  # when `throttled` changed last
    said: float | None = None  # the weight that was said; None: none stands


def clock_weight(clock: int | None, peers: Sequence[int], clock_max: int | None) -> float | None:
    """Return the weight for a clock beside its peers' (without peers, beside what it can do); None if nobody knows."""
    beside = median(peers) if peers else clock_max
    if clock is None or not beside:
        return None
    return round(min(1.0, max(WEIGHT_MIN, clock / beside)), 2)


def evolve(
    policy: ThrottlePolicy, state: Throttle, throttled: bool, weight: float | None, now: float
) -> Throttle:
    """Absorb one reading."""
    if throttled != state.throttled:
        return replace(state, throttled=throttled, since=now)
    if now - state.since < policy.hold_s:
        return state
    if not throttled:
        return replace(state, said=None)
    if weight is None or abs(weight - (1.0 if state.said is None else state.said)) < policy.dead_band - 1e-9:
        return state
    return replace(state, said=weight)
