"""Decides how many workers each model should have, from its traffic, capacity and past changes.

    stale data, or recent traffic unknown   ──▶ hold, because unknown traffic does not mean low traffic
    an operator has set the number          ──▶ that number, until the operator releases it
    more workers are needed soon            ──▶ up, to the number that may be needed until the next change
    fewer workers suffice, and would have   ──▶ down, to the number that suffices for the forecast and for the recent peak
      sufficed for `down_after_s`
    lost workers                            ──▶ replaced, because they carry no load

"Up" and "down" mean more and fewer workers, and "hold" means the present number. One change adds or removes at most `step_max`
workers, or the share `step_share` of the workers if that is more. Decisions depend only on data from the journal. So two
planners that have read the same events decide the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import TypeAlias

from controller.deciders.validation import STRICT, at_least, demand
from controller.planner import sizing
from controller.planner.forecast import LoadForecast, forecast, methods
from events.observations import Profile

SHAPE_BINS = 10  # recent bins that give the shape of the next requests
KNOWN_LEAST = 2  # minimum number of known bins
DOWN_LEAST = 10  # the same, to reduce the number of workers
PERIOD_S = 86_400.0
HOUR = timedelta(hours=1)
MISTAKEN = timedelta(minutes=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerPolicy:
    """Limits and waiting times for changes of the number of workers."""

    workers_min: int = 1  # minimum workers of each model, without spares
    workers_max: int = 1000  # maximum workers of each model
    gpus_max: int | None = None  # maximum GPUs of all models together; None: unlimited
    start_s: float = 60.0  # seconds until a new worker serves
    ahead_s: float = 240.0  # seconds for which a change should suffice
    step_max: int = 8  # maximum workers in one change (Dynamo's), or
    step_share: float = 0.34  # this share of them, if that is more
    up_cooldown_s: float = 60.0  # seconds from any change to the next increase
    down_cooldown_s: float = 180.0  # seconds from any change to the next reduction
    down_after_s: float = 120.0  # seconds for which fewer workers must have sufficed
    trigger: float = 0.2  # share of the forecast's margin added to the expected load
    slack: float = 0.08  # share of the needed workers by which an excess is tolerated
    changes_per_hour: int = 12  # maximum changes per hour
    changes_for_up: int = 3  # of these, reserved for increases
    missed: float = 0.01  # share of answers that may be late
    stale_s: float = 10.0  # seconds; no planning on an older projection
    unknown_s: float = 180.0  # seconds without known traffic after which it holds
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        least, most, missed = self.workers_min, self.workers_max, self.missed
        at_least(0, start_s=self.start_s)
        at_least(1, workers_min=least, step_max=self.step_max, changes_per_hour=self.changes_per_hour)
        demand(0 < missed < 1, f"missed is {missed}: it must be a share of the answers between 0 and 1")
        demand(most >= least, f"workers_max is {most}, which is less than workers_min {least}")


@dataclass(frozen=True, slots=True)
class Change:
    """An earlier change of the number of workers."""

    at: datetime
    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """The planner's input for one model."""

    model: str
    provisioned: int  # existing workers in any state, without spares and draining ones
    lost: int = 0  # of these: dead, convicted, or out of service for longer than a ramp
    gpus: int = 1  # per worker
    profile: Profile
    objectives: sizing.Objectives
    minutes: Sequence[sizing.Seen]  # traffic, the latest last
    set_by_operator: int | None = None  # the number set by an operator, until it is released
    floor: int = 0  # minimum number
    changes: Sequence[Change] = ()  # of the last hour, the latest last


@dataclass(frozen=True, slots=True)
class Proposal:
    """The number of workers that one model should have, with the reason."""

    model: str
    before: int
    after: int
    why: str  # up, down, operator, floor, lost; hold: …
    needed: int  # needed for the forecast
    forecast: LoadForecast | None = None
    bound: str = ""  # the objective that requires them
    held: str = ""  # what prevents a change; empty: nothing


@dataclass(frozen=True, slots=True)
class _Needs:
    """The numbers of workers that one model needs, before limits and waiting times are applied.

    `soon` suffices for the load that is expected while a new worker starts. `now` suffices for the load that is possible until
    the next change. `lately` suffices for the same load as `now`, and also for the recent peak.
    """

    soon: int  # for the forecast until new ones could serve, with the share `trigger` of its margin
    now: sizing.Sizing  # for the possible load until the next change
    lately: int  # also for the recent peak
    expected: LoadForecast


Expecting: TypeAlias = Callable[[tuple[float, ...], int], LoadForecast]
"""A forecast function. Its arguments are the known loads, the latest last, and the number of bins to forecast."""


@lru_cache(maxsize=1024)  # entries; it is called every few seconds, and the history changes every minute
def expected(history: tuple[float, ...], ahead: int) -> LoadForecast:
    """Return the load forecast by the method with the least back-test error.

    `history` holds the load of each known bin, the latest last. `ahead` is the number of bins to forecast.
    """
    return forecast(history, ahead, methods(round(PERIOD_S / sizing.BIN_S)))


def plan(
    policy: PlannerPolicy,
    models: Sequence[ModelView],
    now: datetime,
    projection_age_s: float,
    expecting: Expecting = expected,
) -> list[Proposal]:
    """Return a proposal for each model. `expecting` forecasts the load.

    `projection_age_s` is by how many seconds the state store lags behind the journal. If this is more than `policy.stale_s`,
    every proposal keeps the present number of workers.
    """
    if projection_age_s > policy.stale_s:
        why = f"the state store is {projection_age_s:.0f} s behind"
        return [_proposal(view, view.provisioned, "hold", held=why) for view in models]
    proposals = [_of(policy, view, now, expecting) for view in models]
    return _within_budget(policy, models, proposals)


def _of(policy: PlannerPolicy, view: ModelView, now: datetime, expecting: Expecting) -> Proposal:
    floor = max(policy.workers_min, view.floor)
    if view.set_by_operator is not None:
        wanted = max(0, min(policy.workers_max, view.set_by_operator))
        return Proposal(view.model, view.provisioned, wanted, "operator", wanted)
    short = view.provisioned - view.lost < floor
    if (why := unknown(policy, view)) is not None:
        if short:
            return _stepped(policy, view, min(floor + view.lost, policy.workers_max), "floor", None, now)
        return _proposal(view, view.provisioned, "hold", held=why)
    needed = needs(policy, view, expecting)
    soon = _bounded(policy, floor, needed.soon) + view.lost
    target = _bounded(policy, floor, needed.now.workers) + view.lost
    lately = _bounded(policy, floor, needed.lately) + view.lost
    if soon > view.provisioned:
        why = "floor" if short else "lost" if target - view.lost <= view.provisioned else "up"
        return _stepped(policy, view, min(target, policy.workers_max), why, needed, now)
    seen = len(sizing.known(view.minutes)) >= DOWN_LEAST
    if seen and lately < view.provisioned and view.provisioned - lately > policy.slack * lately:
        return _stepped(policy, view, lately, "down", needed, now)
    return _proposal(view, view.provisioned, "hold", needed)


def _bounded(policy: PlannerPolicy, floor: int, workers: int) -> int:
    return max(floor, min(workers, policy.workers_max))


def unknown(policy: PlannerPolicy, view: ModelView) -> str | None:
    """Return why a model's traffic is not known well enough for a plan; None if it is."""
    last = view.minutes[-max(1, round(policy.unknown_s / sizing.BIN_S)) :]
    if not sizing.known(last):
        return f"no frontend reported traffic in the last {policy.unknown_s:.0f} s"
    if len(sizing.known(view.minutes)) < KNOWN_LEAST:
        return "too little is known of its traffic yet"
    return None


def needs(policy: PlannerPolicy, view: ModelView, expecting: Expecting = expected) -> _Needs:
    """Return how many workers a model needs for its forecast load, and for its recent peak.

    `expecting` forecasts the load.
    """
    minutes = sizing.known(view.minutes)
    history = [sizing.work(minute.traffic, view.profile) for minute in minutes]
    pressure = sizing.sustained_pressure(minutes, view.profile, view.objectives)
    ahead, starts = (
        ceil((policy.start_s + policy.ahead_s) / sizing.BIN_S),
        ceil(policy.start_s / sizing.BIN_S),
    )
    predicted = expecting(tuple(history), ahead)
    shape = sizing.total(minutes[-SHAPE_BINS:])
    one = sizing.work(shape, view.profile)

    def sized(seconds_of_work: float) -> sizing.Sizing:
        as_now = shape.times(seconds_of_work / one) if one > 0 else sizing.Traffic()
        found = sizing.size(as_now, sizing.BIN_S, view.profile, view.objectives)
        return sizing.Sizing(ceil(found.workers / pressure), found.bound)

    now = sized(predicted.peak)
    soon = sized(max(predicted.values[: starts + 1]) * (1 + predicted.margin * policy.trigger))
    last = minutes[-max(1, round(policy.down_after_s / sizing.BIN_S)) :]
    peak = max((sized(sizing.work(minute.traffic, view.profile)).workers for minute in last), default=0)
    return _Needs(soon.workers, now, max(now.workers, peak), predicted)


def _stepped(
    policy: PlannerPolicy, view: ModelView, target: int, why: str, needed: _Needs | None, now: datetime
) -> Proposal:
    """Return a proposal with the next step towards `target` workers. `why` is the reason for this target.

    If a waiting time or a limit does not allow a change yet, the proposal keeps the present number.
    """
    up = target > view.provisioned
    if (held := _too_soon(policy, view, now, up=up, short=why == "floor")) is not None:
        return _proposal(view, view.provisioned, "hold", needed, held)
    most = max(policy.step_max, int(policy.step_share * view.provisioned))
    step = min(abs(target - view.provisioned), most)
    return _proposal(view, view.provisioned + (step if up else -step), why, needed)


def _too_soon(policy: PlannerPolicy, view: ModelView, now: datetime, *, up: bool, short: bool) -> str | None:
    """Return why no change is allowed yet; None if a change is allowed.

    `up` tells whether the change adds workers. `short` tells whether the model has fewer workers than its minimum. If `short`
    is true, the limit of changes per hour does not apply.
    """
    changes = [change for change in view.changes if now - change.at < HOUR]
    allowed = policy.changes_per_hour - (0 if up else policy.changes_for_up)
    if len(changes) >= allowed and not short:
        return f"{len(changes)} changes within the hour"
    if not changes:
        return None
    since_s = (now - changes[-1].at).total_seconds()
    cooldown_s = policy.up_cooldown_s if up else policy.down_cooldown_s * 2 ** _reversals(changes)
    return f"the last change was {since_s:.0f} s ago" if since_s < cooldown_s else None


def _reversals(changes: Sequence[Change]) -> int:
    """Return how many reductions were followed by an increase within 3 minutes (MISTAKEN).

    Each of these doubles the wait before the next reduction.
    """
    return sum(
        one.after < one.before and other.after > other.before and other.at - one.at <= MISTAKEN
        for one, other in pairwise(changes)
    )


def _proposal(
    view: ModelView, after: int, why: str, needed: _Needs | None = None, held: str = ""
) -> Proposal:
    before = view.provisioned
    if needed is None:
        return Proposal(view.model, before, after, why, 0, held=held)
    now = needed.now
    return Proposal(view.model, before, after, why, now.workers, needed.expected, now.bound, held)


def _within_budget(
    policy: PlannerPolicy, models: Sequence[ModelView], proposals: Sequence[Proposal]
) -> list[Proposal]:
    """Limit the proposals to `gpus_max` GPUs for all models together.

    Each additional worker goes to the model with the largest ratio of proposed workers to workers granted so far.
    """
    if policy.gpus_max is None:
        return list(proposals)
    gpus = {view.model: view.gpus for view in models}
    free = policy.gpus_max - sum(gpus[p.model] * min(p.before, p.after) for p in proposals)
    granted = {p.model: min(p.before, p.after) for p in proposals}
    wanting = {p.model: p for p in proposals if p.after > p.before}
    while wanting:
        name = max(wanting, key=lambda model: (wanting[model].after / max(1, granted[model]), model))
        if gpus[name] > free:
            del wanting[name]
            continue
        free -= gpus[name]
        granted[name] += 1
        if granted[name] >= wanting[name].after:
            del wanting[name]
    return [_cut(p, granted[p.model], policy.gpus_max) for p in proposals]


def _cut(proposal: Proposal, granted: int, gpus_max: int) -> Proposal:
    if granted == proposal.after:
        return proposal
    held = f"the budget of {gpus_max} GPUs is used up"
    why = proposal.why if granted > proposal.before else "hold"
    return replace(proposal, after=granted, why=why, held=held)
