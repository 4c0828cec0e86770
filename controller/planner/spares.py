"""How many spares does a fleet need, and what does it lack with so many?

Failures of many independent units come as a Poisson process, and each unit is away for a while: how many are away at one moment
is Poisson distributed around rate times mean time to repair, however these times differ (M/G/∞). As many spares as its quantile
are enough for that share of the time. What a reader would get wrong: percentages do not pool. 128 nodes need 7.8 % for 99.9 %,
1,250 need 3.8 % for as much.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, exp, inf, lgamma, log

from controller.deciders.validation import STRICT, at_least, demand


@dataclass(frozen=True, slots=True, kw_only=True)
class SparePolicy:
    """How many spares each model has, by how many workers or groups it has besides."""

    spares: int | None = None  # so many; None: as many as failures make necessary
    spare_threshold: int = 16  # workers from which on there are any, where their number is not set
    per_day: float = 0.0042  # failures of one worker or group in a day (StepFun's nodes)
    mttr_days: float = 5.54  # mean time until it is back
    target: float = 0.99  # of the time, for which they are to be enough
    share_min: float = 0.05  # share of the workers
    share_max: float = 0.10
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        at_least(0, per_day=self.per_day, mttr_days=self.mttr_days, share_min=self.share_min)
        if self.spares is not None:
            at_least(0, spares=self.spares)
        demand(
            0 < self.target < 1, f"target is {self.target}: a share of the time, between 0 and 1, is wanted"
        )
        demand(
            self.share_max >= self.share_min,
            f"share_max is {self.share_max}, which is less than share_min {self.share_min}",
        )


def spares_needed(n_nodes: int, rate: float, mttr: float, target: float) -> int:
    """Return the least number of spares that is enough for a share `target` of the time: the quantile of the nodes that are away.
    `rate`: failures of one node per time, `mttr`: the mean time to its repair, of the same unit. Raise ValueError for what is
    no share or negative."""
    if not 0 <= target < 1 or min(n_nodes, rate, mttr) < 0:
        raise ValueError(
            f"target {target} must be 0 or more and below 1; nodes, rate and repair not negative"
        )
    mean = n_nodes * rate * mttr
    if mean == 0:
        return 0
    away, covered = 0, exp(-mean)
    while covered < target:
        away += 1
        covered += exp(away * log(mean) - mean - lgamma(away + 1))
        if away > 10 * mean + 1000:  # what is left is rounding
            break
    return away


def spares_for(policy: SparePolicy, workers: int) -> int:
    """Return how many spares a model with so many workers has."""
    if policy.spares is not None:
        return policy.spares
    if workers < policy.spare_threshold:
        return 0
    needed = spares_needed(workers, policy.per_day, policy.mttr_days, policy.target)
    least, most = ceil(policy.share_min * workers - 1e-9), int(policy.share_max * workers + 1e-9)
    return max(least, min(needed, most))


@dataclass(frozen=True, slots=True)
class Outage:
    """A unit, active or spare, is away. Any unit of time."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Missing:
    """What a fleet lacked, in units × time."""

    unit_time: float  # of active places that nobody filled
    worst: int  # units, at one moment
    lacking: float  # share of the time in which any was missing
    replaced: int  # times that a spare took a place


def missing(outages: Sequence[Outage], spares: int, activation: float, until: float) -> Missing:
    """Return what a fleet with so many spares lacks over `until`, if a spare takes a place within `activation`.

    A spare that is away can replace nobody: a place is empty for the time that a spare takes, and for as long as more units are
    away than there are spares. A unit that is back fills an empty place as quickly as a spare does, or becomes a spare.
    """
    ends: list[float] = []
    away = worst = replaced = 0
    lost = lacking = last = 0.0
    moments = sorted((one.begin, one.end) for one in outages if one.begin < until)
    for begin, end in [*moments, (until, inf)]:
        while ends and ends[0] <= begin:
            at = heappop(ends)
            short = max(0, away - spares)
            lost, lacking, last = lost + short * (at - last), lacking + (at - last) * (short > 0), at
            away -= 1
        short = max(0, away - spares)
        lost, lacking, last = lost + short * (begin - last), lacking + (begin - last) * (short > 0), begin
        if begin >= until:
            break
        away += 1
        if away <= spares:
            replaced += 1
            lost += min(activation, end - begin)
        worst = max(worst, away - spares)
        heappush(ends, min(end, until))
    return Missing(lost, max(0, worst), lacking / until if until > 0 else 0.0, replaced)
