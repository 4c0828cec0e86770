"""Invariants of planner proposals, for example that a proposal is based on recent data."""

from datetime import timedelta
from typing import TypeVar

from controller.planner.plan import PlannerPolicy
from controller.simulator.checks.watch import Found, InvariantWatch, invariant
from controller.simulator.world.kernel import EPOCH, SECOND, since_start
from controller.simulator.world.planner import EVERY
from events.fact import Recorded
from events.observations import ScaleProposed, ScaleSet, TrafficReported

MISSED_LOOKS = 4 * EVERY  # attempts in a row: a request to the broker may be lost
TOLD_S = 75.0  # maximum time until the current minute has ended and was reported
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
F = TypeVar("F", TrafficReported, ScaleSet, ScaleProposed)


def _policy(watch: InvariantWatch) -> PlannerPolicy:
    planning = watch.world.scenario.planning
    assert planning is not None
    return planning.policy


def _about(watch: InvariantWatch, kind: type[F], model: str, through: int) -> list[tuple[Recorded, F]]:
    """Return the facts of one kind about a model, each as a pair (event, fact), up to the sequence `through`."""
    facts = ((event, event.fact) for event in watch.world.broker.events[:through])
    return [(event, fact) for event, fact in facts if isinstance(fact, kind) and fact.model == model]


@invariant("proposed")
def planner_floor(watch: InvariantWatch, fact: ScaleProposed) -> Found:
    """No planner reduces the workers of a model below the policy's minimum, unless an operator set the number."""
    least = _policy(watch).workers_min
    if fact.why != "operator" and fact.after < min(fact.before, least):
        yield f"{fact.model}: {fact.before} to {fact.after}, but the minimum is {least}"


@invariant("proposed")
def planner_fresh(watch: InvariantWatch, fact: ScaleProposed) -> Found:
    """No planner makes a proposal from outdated contents of the state store.

    The contents are outdated if they lack an event that is older than a limit. The limit is the policy's `stale_s` plus
    MISSED_LOOKS, which allows for lost requests to the broker.
    """
    events = watch.world.broker.events
    if fact.position >= len(events):
        return
    # Age of the first event that the planner has not read.
    age = watch.kernel.now - since_start(events[fact.position].at)
    if age > int(_policy(watch).stale_s * SECOND) + MISSED_LOOKS:
        yield f"{fact.planner} has read up to {fact.position}, which was the end {age / SECOND:.1f} s ago"


@invariant("proposed")
def planner_needs_traffic(watch: InvariantWatch, fact: ScaleProposed) -> Found:
    """No planner scales a model by its traffic if the last traffic report is too old.

    The report is too old if the reported minute ended longer ago than the policy's `unknown_s` plus TOLD_S. TOLD_S is the time
    until the current minute has ended and was reported.
    """
    if fact.why not in ("up", "down"):
        return
    reports = _about(watch, TrafficReported, fact.model, watch.world.broker.last_seq)
    ends = [report.minute + MINUTE for _, report in reports]
    reported_until = max(ends, default=EPOCH)
    silent_s = (watch.kernel.now - since_start(reported_until)) / SECOND
    if silent_s > _policy(watch).unknown_s + TOLD_S:
        yield f"{fact.model}: {fact.why} to {fact.after}, but no traffic was reported for {silent_s:.0f} s"


@invariant("proposed")
def planner_obeys_operator(watch: InvariantWatch, fact: ScaleProposed) -> Found:
    """A planner proposes the number of workers that an operator has set, until the operator releases the number.

    The planner must obey each command that it has read. Numbers above the policy's `workers_max` are reduced to this maximum.
    """
    known = _about(watch, ScaleSet, fact.model, fact.position)
    set_size = known[-1][1].workers if known else None
    if (fact.why == "operator") is not (set_size is not None):
        yield f"{fact.model}: to {fact.after} ({fact.why}), an operator has set {set_size}"
    if set_size is not None and fact.after != min(set_size, _policy(watch).workers_max):
        yield f"{fact.model}: to {fact.after}, an operator has set {set_size}"


@invariant("recorded", ScaleProposed)
def planner_in_turn(watch: InvariantWatch, event: Recorded, fact: ScaleProposed) -> Found:
    """A planner that makes a proposal has read the previous proposal for the model."""
    for before, _ in _about(watch, ScaleProposed, fact.model, event.seq - 1)[-1:]:
        if fact.position < before.seq:
            yield f"{event.source} had read up to {fact.position}, and {before.source} had proposed at {before.seq}"


@invariant("recorded", ScaleProposed)
def planner_steady(watch: InvariantWatch, event: Recorded, fact: ScaleProposed) -> Found:
    """Proposals respect the waiting times between changes, and the limit of changes per hour."""
    if fact.why == "operator":
        return
    policy = _policy(watch)
    before = _about(watch, ScaleProposed, fact.model, event.seq - 1)
    lately = [one for one, _ in before if event.at - one.at < HOUR]
    if len(lately) >= policy.changes_per_hour and fact.why != "floor":
        yield f"{fact.model}: {len(lately)} proposals within the last hour, and one more"
    wait_s = policy.up_cooldown_s if fact.after > fact.before else policy.down_cooldown_s
    if lately and (event.at - lately[-1].at).total_seconds() < wait_s:
        yield f"{fact.model}: {fact.before} to {fact.after} at {event.at}, the previous one was at {lately[-1].at}"
