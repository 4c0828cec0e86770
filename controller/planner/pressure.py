"""Calibrates the sizing model: the pressure that workers sustain, from their share of late answers.

A minute's pressure is the number of workers that the model computes for its traffic, divided by the number that served. At 1
the workers carry exactly what the model allows. If more answers than allowed were late at a pressure near 1, the model is
too optimistic for these workers and this traffic. The needs are then divided by the highest pressure at which few were late.
If workers sustain 1 and more with a quarter of the allowed late answers, a slightly higher pressure is tried. Without data
the model is trusted.
"""

from collections.abc import Sequence
from functools import lru_cache

from controller.planner.sizing import Objectives, size
from controller.planner.traffic import BIN_S, Minute, Traffic
from events.observations import Profile

MINUTES = 120  # number of recent minutes considered
STEP, WIDTH, LEAST, MOST = 0.05, 0.15, 0.5, 1.5  # step, window, minimum and maximum of pressures
A_FEW = 0.25  # share of the allowed late answers
BEYOND = 0.15  # how far beyond a sustained pressure to try
MINUTES_LEAST = 4  # minutes at a pressure beyond 1 before it is trusted


@lru_cache(maxsize=4096)
def needed(traffic: Traffic, profile: Profile, objectives: Objectives) -> int:
    """Return how many workers a minute's traffic needed according to the model."""
    return size(traffic, BIN_S, profile, objectives).workers


def sustained_pressure(minutes: Sequence[Minute], profile: Profile, objectives: Objectives) -> float:
    """Return the highest pressure at which no more answers than allowed were late: LEAST to MOST."""
    seen = [
        (needed(minute.traffic, profile, objectives) / minute.workers, minute.late, minute.traffic.requests)
        for minute in minutes[-MINUTES:]
        if minute.workers > 0 and minute.traffic.requests > 0
    ]
    if (borne := _borne_beyond(seen, objectives)) > 1.0:
        return borne
    upper = 1.0
    while upper > LEAST:
        near = [(late, requests) for pressure, late, requests in seen if upper - WIDTH < pressure <= upper]
        requests = sum(each for _, each in near)
        if sum(late for late, _ in near) <= objectives.missed * requests:
            return upper
        upper -= STEP
    return LEAST


def _borne_beyond(seen: Sequence[tuple[float, float, float]], objectives: Objectives) -> float:
    """Return the highest pressure beyond 1 that workers have sustained for some minutes; 1 if none."""
    upper = MOST
    while upper > 1.0:
        above = [(late, requests) for pressure, late, requests in seen if pressure > upper - BEYOND]
        near = sum(upper - BEYOND < pressure <= upper for pressure, _, _ in seen)
        few = sum(late for late, _ in above) <= objectives.missed * A_FEW * sum(
            requests for _, requests in above
        )
        if near >= MINUTES_LEAST and few:
            return upper
        upper -= STEP
    return 1.0
