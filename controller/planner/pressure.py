"""How much of what the model of `sizing` allows can workers really bear? Measured: by which part of their answers were late.

A minute's pressure is what its traffic needed over what was there: at 1 workers had just what the model says. Where it was near 1
and more answers were late than may be, the model is too bold for these workers and this traffic, and needs are divided by the
greatest pressure at which few were. Where workers bear 1 and more, with a quarter of the late answers that may be, a little more
than they have borne is tried. Where nothing is known the model is believed.
"""

from collections.abc import Sequence
from functools import lru_cache

from controller.planner.sizing import Objectives, size
from controller.planner.traffic import BIN_S, Minute, Traffic
from events.observations import Profile

MINUTES = 120  # that are looked at
STEP, WIDTH, LEAST, MOST = 0.05, 0.15, 0.5, 1.5  # of pressures that are looked at together
A_FEW = 0.25  # of the late answers that may be
BEYOND = 0.15  # what workers have borne, so much more of it is tried
MINUTES_LEAST = 4  # of a pressure beyond 1, before it is believed


@lru_cache(maxsize=4096)
def needed(traffic: Traffic, profile: Profile, objectives: Objectives) -> int:
    """Return how many workers a minute's traffic needed, by the model."""
    return size(traffic, BIN_S, profile, objectives).workers


def bearable(minutes: Sequence[Minute], profile: Profile, objectives: Objectives) -> float:
    """Return the greatest pressure at which no more answers than may be were late: LEAST to MOST."""
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
    """Return the greatest pressure beyond 1 that workers have borne well for some minutes; 1: none."""
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
