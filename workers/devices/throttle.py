"""The weight of a throttled GPU compared with its peers, and the hysteresis of its reports.

    calm ── throttled for hold_s ──▶ reported (weight) ── a step of dead_band ──▶ reported (another weight)
      ▲                                    └── not throttled for hold_s ──▶ cleared ─┐
      └──────────────────────────────────────────────────────────────────────────────┘

The weight is clamp(clock / median of the peers' clocks, 0.1, 1). Short dips are normal, and a fluctuating weight would move
traffic back and forth: hence the hold time and the dead band.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

WEIGHT_MIN = 0.1  # a slow worker still gets some traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottlePolicy:
    """Thresholds for reporting a throttled clock."""

    hold_s: float = 10.0
    dead_band: float = 0.1  # as a share of the full weight


@dataclass(frozen=True, slots=True)
class Throttle:
    """The throttling state of one GPU. Times are in seconds of the watch's own clock."""

    throttled: bool = False
    since: float = 0.0  # when `throttled` last changed
    reported: float | None = None  # the last reported weight; None: none is active


def clock_weight(clock: int | None, peers: Sequence[int], clock_max: int | None) -> float | None:
    """Return the clock's ratio to its peers, or without peers to its maximum; None if unknown."""
    reference = median(peers) if peers else clock_max
    if clock is None or not reference:
        return None
    return round(min(1.0, max(WEIGHT_MIN, clock / reference)), 2)


def evolve(
    policy: ThrottlePolicy, state: Throttle, throttled: bool, weight: float | None, now: float
) -> Throttle:
    """Apply one reading."""
    if throttled != state.throttled:
        return replace(state, throttled=throttled, since=now)
    if now - state.since < policy.hold_s:
        return state
    if not throttled:
        return replace(state, reported=None)
    if (
        weight is None
        or abs(weight - (1.0 if state.reported is None else state.reported)) < policy.dead_band - 1e-9
    ):
        return state
    return replace(state, reported=weight)
