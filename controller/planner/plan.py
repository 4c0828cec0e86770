"""How many workers should there be? The planner's decider: a function of what is read, and of what was decided before.

    stale, or nobody knows what came lately ──▶ hold: what is not known is no low load
    an operator has set the number          ──▶ that, until he releases it
    more are needed soon than there are     ──▶ up, at most `step_max`, to what may be needed until the next change
    fewer would do, and would have done     ──▶ down, at most `step_max`: for what is expected and for the most of the last
      for `down_after_s`                        while, with the traffic of those that go shared by those that stay
    lost workers are replaced: who does not serve carries nothing

Nothing is remembered but what the journal says was decided: two planners that read the same decide the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import TypeAlias

from controller.deciders.validation import STRICT, at_least, demand
from controller.planner.forecast import LoadForecast, forecast, methods
from controller.planner.pressure import bearable
from controller.planner.sizing import Objectives, Sizing, size
from controller.planner.traffic import BIN_S, Seen, Traffic, known, total, work
from events.observations import Profile

SHAPE_BINS = 10  # by whose requests the next ones are thought to be shaped
KNOWN_LEAST = 2  # bins
DOWN_LEAST = 10  # the same, for fewer workers
PERIOD_S = 86_400.0
HOUR = timedelta(hours=1)
MISTAKEN = timedelta(minutes=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerPolicy:
    """How carefully the planner goes about it."""

    workers_min: int = 1  # of each model, besides spares
    workers_max: int = 1000  # of each model
    gpus_max: int | None = None  # of all models together; None: no bound
    start_s: float = 60.0  # until one more worker serves
    ahead_s: float = 240.0  # for so long a change is to be enough
    step_max: int = 8  # workers in one change (Dynamo's), or
    step_share: float = 0.34  # so large a part of them, if that is more
    up_cooldown_s: float = 60.0  # after any change, until there are more workers
    down_cooldown_s: float = 180.0  # after any change, until there are fewer
    down_after_s: float = 120.0  # fewer must have been enough for so long
    trigger: float = 0.2  # share of the forecast's margin that what is expected soon is raised by
    slack: float = 0.08  # of what is needed: that many more than needed are not worth a change
    changes_per_hour: int = 12  # at most
    changes_for_up: int = 3  # of them, that are kept for more workers
    missed: float = 0.01  # so many answers may be late
    stale_s: float = 10.0  # an older projection is none to plan by
    unknown_s: float = 180.0  # of the latest traffic: then it holds
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        at_least(0, start_s=self.start_s)
        at_least(
            1, workers_min=self.workers_min, step_max=self.step_max, changes_per_hour=self.changes_per_hour
        )
        demand(
            0 < self.missed < 1, f"missed is {self.missed}: a part of the answers, between 0 and 1, is wanted"
        )
        demand(
            self.workers_max >= self.workers_min,
            f"workers_max is {self.workers_max}, which is less than workers_min {self.workers_min}",
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A change that was decided before."""

    at: datetime
    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model, as it was read."""

    model: str
    provisioned: int  # workers that are there, whatever they do; without spares and those that drain
    lost: int = 0  # of them: dead, convicted, out of service for longer than a ramp
    gpus: int = 1  # of each
    profile: Profile
    objectives: Objectives
    minutes: Sequence[Seen]  # what came, the latest last
    set_by_operator: int | None = None  # the number that somebody wants, until he releases it
    floor: int = 0  # never fewer than this
    changes: Sequence[Change] = ()  # of the last hour, the latest last


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one model should have, and why."""

    model: str
    before: int
    after: int
    why: str  # up, down, operator, floor, lost; hold: …
    needed: int  # for what is expected
    forecast: LoadForecast | None = None
    bound: str = ""  # which objective needs them
    held: str = ""  # what keeps it from changing, where anything does


@dataclass(frozen=True, slots=True)
class _Wanted:
    """How many one model needs, before anybody asks what may be."""

    soon: int  # for what is expected until the next ones could serve, without a margin
    now: int  # for what may come until the next change
    lately: int  # and for the most of the last while
    expected: LoadForecast
    sizing: Sizing


Expecting: TypeAlias = Callable[[tuple[float, ...], int], LoadForecast]
"""Foresees the next bins, of which there are so many, from those that are known: the latest last."""


@lru_cache(maxsize=1024)  # models: it is asked every few seconds, and something new comes every minute
def expected(history: tuple[float, ...], ahead: int) -> LoadForecast:
    """Return what the best of all methods foresees."""
    return forecast(history, ahead, methods(round(PERIOD_S / BIN_S)))


def plan(
    policy: PlannerPolicy,
    models: Sequence[ModelView],
    now: datetime,
    projection_age_s: float,
    expecting: Expecting = expected,
) -> list[Proposal]:
    """Return what each model should have from now on."""
    if projection_age_s > policy.stale_s:
        why = f"the state store is {projection_age_s:.0f} s behind"
        return [_hold(view, why) for view in models]
    proposals = [_of(policy, view, now, expecting) for view in models]
    return _within_budget(policy, models, proposals)


def _hold(view: ModelView, why: str) -> Proposal:
    return Proposal(view.model, view.provisioned, view.provisioned, "hold", 0, held=why)


def _of(policy: PlannerPolicy, view: ModelView, now: datetime, expecting: Expecting) -> Proposal:
    floor = max(policy.workers_min, view.floor)
    if view.set_by_operator is not None:
        wanted = max(0, min(policy.workers_max, view.set_by_operator))
        return Proposal(view.model, view.provisioned, wanted, "operator", wanted)
    short = view.provisioned - view.lost < floor
    if (why := unknown(policy, view)) is not None:
        if short:
            return _stepped(policy, view, min(floor + view.lost, policy.workers_max), "floor", None, now)
        return _hold(view, why)
    wanted_now = needs(policy, view, expecting)
    soon = _bounded(policy, floor, wanted_now.soon) + view.lost
    target = _bounded(policy, floor, wanted_now.now) + view.lost
    lately = _bounded(policy, floor, wanted_now.lately) + view.lost
    if soon > view.provisioned:
        why = "floor" if short else "lost" if target - view.lost <= view.provisioned else "up"
        return _stepped(policy, view, min(target, policy.workers_max), why, wanted_now, now)
    seen = len(known(view.minutes)) >= DOWN_LEAST
    if seen and lately < view.provisioned and view.provisioned - lately > policy.slack * lately:
        return _stepped(policy, view, lately, "down", wanted_now, now)
    return _told(view, view.provisioned, "hold", wanted_now, "")


def _bounded(policy: PlannerPolicy, floor: int, workers: int) -> int:
    return max(floor, min(workers, policy.workers_max))


def unknown(policy: PlannerPolicy, view: ModelView) -> str | None:
    """Return why nothing can be planned for a model; None: it can."""
    last = view.minutes[-max(1, round(policy.unknown_s / BIN_S)) :]
    if not known(last):
        return f"no frontend reported traffic in the last {policy.unknown_s:.0f} s"
    if len(known(view.minutes)) < KNOWN_LEAST:
        return "too little is known of its traffic yet"
    return None


def needs(policy: PlannerPolicy, view: ModelView, expecting: Expecting = expected) -> _Wanted:
    """Return how many workers a model needs for what is expected, and for the most of the last while as well."""
    minutes = known(view.minutes)
    history = [work(minute.traffic, view.profile) for minute in minutes]
    pressure = bearable(minutes, view.profile, view.objectives)
    ahead, starts = ceil((policy.start_s + policy.ahead_s) / BIN_S), ceil(policy.start_s / BIN_S)
    foreseen = expecting(tuple(history), ahead)
    shape = total(minutes[-SHAPE_BINS:])
    one = work(shape, view.profile)

    def sized(seconds_of_work: float) -> Sizing:
        as_now = shape.times(seconds_of_work / one) if one > 0 else Traffic()
        found = size(as_now, BIN_S, view.profile, view.objectives)
        return Sizing(ceil(found.workers / pressure), found.bound)

    now, soon = (
        sized(foreseen.peak),
        sized(max(foreseen.values[: starts + 1]) * (1 + foreseen.margin * policy.trigger)),
    )
    lately = now.workers
    for minute in minutes[-max(1, round(policy.down_after_s / BIN_S)) :]:
        lately = max(lately, sized(work(minute.traffic, view.profile)).workers)
    return _Wanted(soon.workers, now.workers, lately, foreseen, now)


def _stepped(
    policy: PlannerPolicy, view: ModelView, target: int, why: str, wanted: _Wanted | None, now: datetime
) -> Proposal:
    """Return the next step to a target, if it may be taken now."""
    up = target > view.provisioned
    if (held := _too_soon(policy, view, now, up=up, short=why == "floor")) is not None:
        return _told(view, view.provisioned, "hold", wanted, held)
    most = max(policy.step_max, int(policy.step_share * view.provisioned))
    step = min(abs(target - view.provisioned), most)
    return _told(view, view.provisioned + (step if up else -step), why, wanted, "")


def _too_soon(policy: PlannerPolicy, view: ModelView, now: datetime, *, up: bool, short: bool) -> str | None:
    """`short`: there are fewer than there must be, which no number of changes excuses."""
    changes = [change for change in view.changes if now - change.at < HOUR]
    allowed = policy.changes_per_hour - (0 if up else policy.changes_for_up)
    if len(changes) >= allowed and not short:
        return f"{len(changes)} changes within the hour"
    if not changes:
        return None
    since_s = (now - changes[-1].at).total_seconds()
    cooldown_s = policy.up_cooldown_s if up else policy.down_cooldown_s * 2 ** _mistaken(changes)
    return f"the last change was {since_s:.0f} s ago" if since_s < cooldown_s else None


def _mistaken(changes: Sequence[Change]) -> int:
    """Return how often fewer workers were soon found to be too few: each time the next ones stay for twice as long."""
    return sum(
        one.after < one.before and other.after > other.before and other.at - one.at <= MISTAKEN
        for one, other in pairwise(changes)
    )


def _told(view: ModelView, after: int, why: str, wanted: _Wanted | None, held: str) -> Proposal:
    if wanted is None:
        return Proposal(view.model, view.provisioned, after, why, 0, held=held)
    return Proposal(
        view.model,
        view.provisioned,
        after,
        why,
        wanted.now,
        wanted.expected,
        wanted.sizing.bound,
        held,
    )


def _within_budget(
    policy: PlannerPolicy, models: Sequence[ModelView], proposals: Sequence[Proposal]
) -> list[Proposal]:
    """Return the proposals that all models together have GPUs for: who lacks most gets the next worker."""
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
