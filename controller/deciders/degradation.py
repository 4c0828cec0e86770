"""Sets the degradation level of one model, by comparing the capacity of its workers with its SLO.

    ratio = requests/s that the routable workers could carry / slo_throughput_rps

    level 0 ── ratio < 1.00 ──▶ 1 ── < 0.75 ──▶ 2 ── < 0.50 ──▶ 3 ── < 0.25 ──▶ 4
            ◀── ≥ 1.05 ──────     ◀── ≥ 0.80 ──   ◀── ≥ 0.55 ──   ◀── ≥ 0.30 ──      (after the dwell)

    provisioned = the ratio if every worker that should serve had full weight

An arrow to the right shows the ratio below which the next level is entered. An arrow to the left shows the exit ratio, at which
the model returns to the previous level. An exit ratio is at most `provisioned`, but never below the entry ratio.

| level | batch size | shed | latency | accept new |
|---|---|---|---|---|
| 0 NONE | 1.0 | – | 1.0 | yes |
| 1 | 0.75 | – | 1.0 | yes |
| 2 | 0.75 | lowest tier | 1.0 | yes |
| 3 | 0.5 | lowest tier | 2.0 | yes |
| 4 | 0.5 | lowest tier | 2.0 | no |

The level rises as soon as the ratio is too low, and falls only after the dwell, the minimum time at a level. Each change
is one event that sets all four columns. A starting fleet is not degraded: the first level is set when the warm-up after its
first routable worker has ended.

The ratio of each level is computed with that level's latency SLOs. Level 3 relaxes the latency SLOs, which raises the capacity.
The return from level 3 to level 2 is therefore decided with the stricter SLOs of level 2. With those of level 3, the level
would oscillate. The ratio ignores the reduced batch size of a level, because a smaller batch would lower the ratio again. The
decision reports the capacity with the reduced batch size as `predicted_rps`. A latency limit is ignored if no worker could meet
even its relaxed value with a single request, because no level could restore that latency.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise

from controller.deciders.capacity import LATENCY_MAX, Slo, attainable, fleet_capacity, fleet_rps
from controller.deciders.tiers import TIER_DEFAULT, TIERS, Tiers
from controller.deciders.validation import STRICT, at_least, demand
from events.decisions import DegradationChanged, HealthChanged, HealthStatus, Knobs, WorkerDecision
from events.fact import Decision, Fact
from events.frozen import replace
from events.observations import Profile

LEVELS = 5
ANY_MODEL = "*"
_TIER = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradationPolicy:
    """The thresholds and waiting times of the degradation levels, for all models, and each model's SLO."""

    slos: Mapping[str, Slo] = field(default_factory=dict)  # by model name; `*`: every other model
    # a ratio below entries[n] moves past level n
    entries: tuple[float, float, float, float] = (1.0, 0.75, 0.5, 0.25)
    margin: float = 0.05  # a level is left only when the ratio exceeds its entry by this
    # leave a level also at the ratio of all provisioned workers, if that is lower
    exit_at_provisioned: bool = True
    # tolerance of ratio comparisons: weights that sum to 0.9999999999999998 count as 1
    tolerance: float = 1e-9
    dwell: timedelta = timedelta(seconds=10)  # minimum time at a level before a milder one
    warmup: timedelta = timedelta(seconds=5)  # from the first routable worker to the first level
    priority_tiers: tuple[str, ...] = TIERS  # request tiers, best first; the last is shed first
    tier_default: str = TIER_DEFAULT  # tier of a request that names none
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        at_least(0, margin=self.margin, dwell=self.dwell, warmup=self.warmup, tolerance=self.tolerance)
        falls = all(high > low for high, low in pairwise((*self.entries, 0.0)))
        demand(falls, f"entries are {self.entries}: each must be lower than the one before, and above 0")
        tiers = self.priority_tiers
        several = len(tiers) > 1 and len(set(tiers)) == len(tiers)
        demand(several, f"priority_tiers are {tiers}: at least two distinct tiers are required, best first")
        odd = [tier for tier in tiers if not _TIER.fullmatch(tier)]
        valid = "at most 40 characters: lower-case letters, digits, - and _"
        demand(not odd, f"priority_tiers has {odd}: a tier name has {valid}")
        default = self.tier_default
        demand(
            default in tiers, f"tier_default is {default!r}, which is not one of the priority_tiers {tiers}"
        )

    @property
    def tiers(self) -> Tiers:
        """The priority tiers of requests, with the default tier."""
        return Tiers(self.priority_tiers, self.tier_default)

    def slo(self, model: str) -> Slo | None:
        """Return the SLO of `model`, or else the default SLO of all models (`*`); None if neither is set."""
        return self.slos.get(model) or self.slos.get(ANY_MODEL)


@dataclass(frozen=True, slots=True)
class Degradation:
    """The degradation state of one model."""

    model: str
    level: int = 0
    knobs: Knobs = field(default_factory=Knobs)
    ratio: float | None = None  # capacity / SLO throughput, at the last change of level
    capacity_rps: float | None = None
    since: datetime | None = None  # when the level was set, by the deciding controller's clock
    served_since: datetime | None = None  # when a worker of this model first became routable
    incident: str = ""  # under which the level was set
    cause: str = ""  # id of the fact that last changed the capacity


def knobs_of(level: int, tiers: Sequence[str] = TIERS) -> Knobs:
    """Return the four knobs (batch size, shed tier, latency, accepting new requests) of a degradation level.

    The values are those of the table in the module's docstring. The last of `tiers` is the tier that levels 2 to 4 shed.
    """
    shed = tiers[-1]
    ladder = (
        Knobs(),
        Knobs(batch_size=0.75),
        Knobs(batch_size=0.75, shed_tier=shed),
        Knobs(batch_size=0.5, shed_tier=shed, latency=LATENCY_MAX),
        Knobs(batch_size=0.5, shed_tier=shed, latency=LATENCY_MAX, accept_new=False),
    )
    return ladder[level]


LATENCIES = tuple(sorted({knobs_of(level).latency for level in range(LEVELS)}))
LATENCY_OF = tuple(LATENCIES.index(knobs_of(level).latency) for level in range(LEVELS))


def evolve(state: Degradation, fact: Fact, cause: str = "") -> Degradation:
    """Return the degradation state of a model after one fact about the model or one of its workers."""
    match fact:
        case DegradationChanged():
            return replace(
                state,
                level=fact.after,
                knobs=fact.knobs,
                ratio=fact.ratio,
                capacity_rps=fact.capacity_rps,
                since=fact.decided_at,
                incident=fact.incident if fact.after else "",
                cause=cause,
            )
        case HealthChanged(after=HealthStatus.HEALTHY) if state.served_since is None:
            return replace(state, served_since=fact.decided_at, cause=cause)
        case WorkerDecision():
            return replace(state, cause=cause)
        case _:
            return state


def decide(
    policy: DegradationPolicy,
    state: Degradation,
    workers: Sequence[tuple[Profile, float]],
    now: datetime,
    provisioned: Sequence[tuple[Profile, float]] = (),
) -> Iterator[Decision]:
    """Yield a `DegradationChanged` if the level must change now.

    `workers` lists the model's workers, each as its profile and the usable share (0 to 1) of its capacity. `provisioned`
    lists the workers that should be in service, each as its profile and the share 1. `provisioned` is used only while the
    level is above 0.
    """
    slo = policy.slo(state.model)
    throughput = slo.slo_throughput_rps if slo is not None else None
    if slo is None or throughput is None or throughput <= 0:
        if state.level:
            yield _change(policy, state, 0, now)
        return
    if state.served_since is None or (state.since is None and now < state.served_since + policy.warmup):
        return
    carried = fleet_rps(state.model, workers, slo, LATENCIES)
    ratios = [carried[n] / throughput for n in LATENCY_OF]
    exits = _exits(policy, state, slo, throughput, provisioned)
    level = _target(policy, state, ratios, exits)
    dwelt = state.since is None or now >= state.since + policy.dwell
    if level > state.level or (level < state.level and dwelt):
        knobs, within = knobs_of(level, policy.priority_tiers), attainable(slo, workers)
        predicted = fleet_capacity(workers, within, latency=knobs.latency, batch=knobs.batch_size)
        rates = carried[LATENCY_OF[level]], predicted.effective_capacity_rps
        yield _change(policy, state, level, now, ratios[level], *rates)


def due_at(policy: DegradationPolicy, state: Degradation) -> datetime | None:
    """Return when a level change becomes possible if no further fact arrives; None before any worker was routable.

    This is the end of the dwell (the minimum time at a level) or, before the first level is set, the end of the warm-up.
    """
    if state.since is not None:
        return state.since + policy.dwell
    return None if state.served_since is None else state.served_since + policy.warmup


def _exits(
    policy: DegradationPolicy,
    state: Degradation,
    slo: Slo,
    throughput: float,
    provisioned: Sequence[tuple[Profile, float]],
) -> Sequence[float]:
    """Return, for each level below the present one, the lowest ratio at which the model may return to that level.

    The exit ratio is the level's entry ratio plus the margin. It is limited to the ratio that all provisioned workers would
    reach, but never lower than the entry ratio. Without this limit, a model provisioned at 102 % of its SLO could never
    return from level 1 to level 0.
    """
    exits = [entry + policy.margin for entry in policy.entries[: state.level]]
    if not exits or not policy.exit_at_provisioned:
        return exits
    full = fleet_rps(f"{state.model} provisioned", provisioned, slo, LATENCIES)
    reachable = [full[n] / throughput for n in LATENCY_OF]
    return [max(entry, min(exits[n], reachable[n])) for n, entry in enumerate(policy.entries[: state.level])]


def _target(
    policy: DegradationPolicy, state: Degradation, ratios: Sequence[float], exits: Sequence[float]
) -> int:
    """Return the lowest level for which the ratio is high enough.

    For a level below the present one the ratio must reach the exit ratio, for any other level the entry ratio.
    """
    for level, entry in enumerate(policy.entries):
        if ratios[level] >= (exits[level] if level < state.level else entry) - policy.tolerance:
            return level
    return LEVELS - 1


def _change(
    policy: DegradationPolicy, state: Degradation, level: int, now: datetime, *rates: float
) -> DegradationChanged:
    """Return the decision that changes the level to `level`.

    `rates` are three numbers: the ratio, the capacity in requests per second, and the predicted capacity in requests per
    second. For a model without an SLO, `rates` is empty, and the decision records 0 for all three.
    """
    ratio, capacity_rps, predicted_rps = rates or (0.0, 0.0, 0.0)
    return DegradationChanged(
        model=state.model,
        before=state.level,
        after=level,
        ratio=ratio,
        knobs=knobs_of(level, policy.priority_tiers),
        capacity_rps=capacity_rps,
        predicted_rps=predicted_rps if level < LEVELS - 1 else 0.0,
        decided_at=now,
        cause=state.cause,
    )
