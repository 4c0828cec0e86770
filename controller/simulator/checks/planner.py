"""Invariants of planner proposals, for example that a proposal is based on recent data."""

from datetime import timedelta

from controller.planner.plan import PlannerPolicy
from controller.simulator.checks.watch import InvariantWatch, invariant
from controller.simulator.world.kernel import EPOCH, SECOND, since_start
from controller.simulator.world.planner import EVERY
from events.fact import Recorded
from events.observations import ScaleProposed

MISSED_LOOKS = 4 * EVERY  # attempts in a row: a request to the broker may be lost
TOLD_S = 75.0  # maximum time until the current minute has ended and was reported
HOUR = timedelta(hours=1)


def _policy(watch: InvariantWatch) -> PlannerPolicy:
    planning = watch.world.scenario.planning
    assert planning is not None
    return planning.policy


@invariant("proposed")
def planner_floor(watch: InvariantWatch, fact: ScaleProposed) -> str | None:
    """No planner proposes fewer workers than the policy's minimum."""
    least = _policy(watch).workers_min
    if fact.why == "operator" or fact.after >= min(fact.before, least):
        return None
    return f"{fact.model}: {fact.before} to {fact.after}, but the minimum is {least}"


@invariant("proposed")
def planner_fresh(watch: InvariantWatch, fact: ScaleProposed) -> str | None:
    """No planner makes a proposal from outdated contents of the state store.

    The contents are outdated if the next event has been on the journal for longer than the policy's `stale_s`.
    """
    events = watch.world.broker.events
    if fact.position >= len(events):
        return None
    # Age of the first event that the planner has not read.
    age = watch.kernel.now - since_start(events[fact.position].at)
    if age <= int(_policy(watch).stale_s * SECOND) + MISSED_LOOKS:
        return None
    return f"{fact.planner} has read up to {fact.position}, which was the end {age / SECOND:.1f} s ago"


@invariant("proposed")
def planner_needs_traffic(watch: InvariantWatch, fact: ScaleProposed) -> str | None:
    """No planner changes a fleet because of traffic that was not reported for a long time."""
    if fact.why not in ("up", "down"):
        return None
    ledger = watch.ledger
    reported_until = ledger.reported_until.get(fact.model, EPOCH)
    silent_s = (watch.kernel.now - since_start(reported_until)) / SECOND
    if silent_s <= _policy(watch).unknown_s + TOLD_S:
        return None
    return f"{fact.model}: {fact.why} to {fact.after}, but no traffic was reported for {silent_s:.0f} s"


@invariant("proposed")
def planner_obeys_operator(watch: InvariantWatch, fact: ScaleProposed) -> str | None:
    """A number of workers that an operator has set applies until the operator releases it.

    The number applies as soon as the planner has read the operator's command.
    """
    ledger = watch.ledger
    known = [n for seq, n in ledger.scales_set.get(fact.model, ()) if seq <= fact.position]
    set_size = known[-1] if known else None
    if (fact.why == "operator") is not (set_size is not None):
        return f"{fact.model}: to {fact.after} ({fact.why}), an operator has set {set_size}"
    if set_size is None or fact.after == min(set_size, _policy(watch).workers_max):
        return None
    return f"{fact.model}: to {fact.after}, an operator has set {set_size}"


@invariant("recorded", ScaleProposed)
def planner_in_turn(watch: InvariantWatch, event: Recorded, fact: ScaleProposed) -> str | None:
    """A planner that makes a proposal has read the previous proposal for the model."""
    before = watch.ledger.proposals[fact.model][-2:-1]
    if not before or fact.position >= before[0].seq:
        return None
    return f"{event.source} had read up to {fact.position}, and {before[0].source} had proposed at {before[0].seq}"


@invariant("recorded", ScaleProposed)
def planner_steady(watch: InvariantWatch, event: Recorded, fact: ScaleProposed) -> str | None:
    """Proposals respect the waiting times between changes, and the limit of changes per hour."""
    if fact.why == "operator":
        return None
    policy = _policy(watch)
    lately = [one for one in watch.ledger.proposals[fact.model][:-1] if event.at - one.at < HOUR]
    if len(lately) >= policy.changes_per_hour and fact.why != "floor":
        return f"{fact.model}: {len(lately)} proposals within the last hour, and one more"
    wait_s = policy.up_cooldown_s if fact.after > fact.before else policy.down_cooldown_s
    if not lately or (event.at - lately[-1].at).total_seconds() >= wait_s:
        return None
    return (
        f"{fact.model}: {fact.before} to {fact.after} at {event.at}, the previous one was at {lately[-1].at}"
    )
