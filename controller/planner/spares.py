"""Computes how many spares a fleet needs.

Failures of many independent nodes are a Poisson process, and a failed node is away until it is repaired. The number of
nodes that are away at one time is Poisson distributed, with the mean (failures per day) * (mean days to repair).
This holds for any distribution of the repair times (M/G/∞). The 99 % quantile of this number is the number of spares that
suffices for 99 % of the time. The needed share of spares falls with the size of the fleet: for 99.9 % of the time, 128 nodes
need 7.8 % spares, and 1,250 nodes need 3.8 %.
"""

from dataclasses import dataclass
from math import ceil, exp, lgamma, log

from controller.deciders.validation import STRICT, at_least, demand


@dataclass(frozen=True, slots=True, kw_only=True)
class SparePolicy:
    """Settings for the number of spares of a model with a given number of workers or groups."""

    spares: int | None = None  # fixed number; None: computed from the failure rate
    spare_threshold: int = 16  # minimum workers for any spares, if the number is not fixed
    per_day: float = 0.0042  # failures per worker or group and day (StepFun's nodes)
    mttr_days: float = 5.54  # mean time to repair, in days
    target: float = 0.99  # share of the time for which the spares must suffice
    share_min: float = 0.05  # minimum share of the workers
    share_max: float = 0.10  # maximum share of the workers
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        at_least(0, per_day=self.per_day, mttr_days=self.mttr_days, share_min=self.share_min)
        at_least(0, spares=self.spares)
        target, least, most = self.target, self.share_min, self.share_max
        demand(0 < target < 1, f"target is {target}: it must be a share of the time between 0 and 1")
        demand(most >= least, f"share_max is {most}, which is less than share_min {least}")


def spares_needed(n_nodes: int, rate: float, mttr: float, target: float) -> int:
    """Return the smallest number of spares that suffices for a share `target` of the time.

    `rate` is the number of failures of one node per unit of time, and `mttr` is the mean time to repair in the same unit.
    Raise ValueError if the share is invalid or a number is negative.
    """
    if not 0 <= target < 1 or min(n_nodes, rate, mttr) < 0:
        raise ValueError(
            f"target {target} must be at least 0 and below 1; nodes, rate and mttr must not be negative"
        )
    mean = n_nodes * rate * mttr
    if mean == 0:
        return 0
    away, covered = 0, exp(-mean)
    while covered < target:
        away += 1
        covered += exp(away * log(mean) - mean - lgamma(away + 1))
        if away > 10 * mean + 1000:  # the rest is rounding error
            break
    return away


def spares_for(policy: SparePolicy, workers: int) -> int:
    """Return the number of spares for a model with `workers` workers."""
    if policy.spares is not None:
        return policy.spares
    if workers < policy.spare_threshold:
        return 0
    needed = spares_needed(workers, policy.per_day, policy.mttr_days, policy.target)
    least, most = ceil(policy.share_min * workers - 1e-9), int(policy.share_max * workers + 1e-9)
    return max(least, min(needed, most))
