"""Checks of what planners propose: by what is known, by what operators want, in turn, steadily, and never too few."""

from datetime import timedelta

from controller.planner.plan import PlannerPolicy
from controller.simulator.checks.watch import InvariantWatch
from controller.simulator.world.kernel import SECOND, since_start
from controller.simulator.world.planner import EVERY
from events.fact import Recorded
from events.observations import ScaleProposed

MISSED_LOOKS = 4 * EVERY  # in a row: what is asked of the broker may be lost on its way
TOLD_S = 75.0  # until the minute that is running is over, and told of
HOUR = timedelta(hours=1)


def _policy(watch: InvariantWatch) -> PlannerPolicy:
    planning = watch.world.scenario.besides.planning
    assert planning is not None
    return planning.policy


def floor(watch: InvariantWatch, fact: ScaleProposed) -> str | None:
    """Compare a proposal with the fewest that there must be."""
    least = _policy(watch).workers_min
    if fact.why == "operator" or fact.after >= min(fact.before, least):
        return None
    return f"{fact.model}: {fact.before} to {fact.after}, though at least {least} are to be"


def fresh(watch: InvariantWatch, fact: ScaleProposed) -> str | None:
    """Look for how long the journal has held what whoever proposes has not read."""
    events = watch.world.broker.events
    if fact.position >= len(events):
        return None
    age = watch.kernel.now - since_start(events[fact.position].at)  # of the first that it has not read
    may = int(_policy(watch).stale_s * SECOND) + MISSED_LOOKS
    return (
        f"{fact.planner} has read up to {fact.position}, which was the end {age / SECOND:.1f} s ago"
        if age > may
        else None
    )


def knows(watch: InvariantWatch, fact: ScaleProposed) -> str | None:
    """Look whether anybody has told lately what comes."""
    if fact.why not in ("up", "down"):
        return None
    ledger = watch.ledger
    told = ledger.told.get(fact.model)
    silent_s = (watch.kernel.now - (since_start(told) if told is not None else 0)) / SECOND
    may_s = _policy(watch).unknown_s + TOLD_S
    return (
        f"{fact.model}: {fact.why} to {fact.after}, told of is nothing for {silent_s:.0f} s"
        if silent_s > may_s
        else None
    )


def heeds(watch: InvariantWatch, fact: ScaleProposed) -> str | None:
    """Compare a proposal with the number that an operator has set, as far as whoever proposes has read."""
    wanted, ledger = None, watch.ledger
    for seq, workers in ledger.scales_set.get(fact.model, ()):
        if seq <= fact.position:
            wanted = workers
    if (fact.why == "operator") is not (wanted is not None):
        return f"{fact.model}: to {fact.after} ({fact.why}), an operator has set {wanted}"
    if wanted is None or fact.after == min(wanted, _policy(watch).workers_max):
        return None
    return f"{fact.model}: to {fact.after}, an operator has set {wanted}"


def in_turn(watch: InvariantWatch, event: Recorded) -> str | None:
    """Look whether whoever proposes had read the proposal before."""
    fact = event.fact
    if not isinstance(fact, ScaleProposed):
        return None
    ledger = watch.ledger
    before = ledger.proposals.get(fact.model, ())[-2:-1]
    if not before or fact.position >= before[0].seq:
        return None
    return f"{event.source} had read up to {fact.position}, and {before[0].source} had proposed at {before[0].seq}"


def steady(watch: InvariantWatch, event: Recorded) -> str | None:
    """Compare the time since the proposal before with the cool-down, and count those of the last hour."""
    fact, policy = event.fact, _policy(watch) if isinstance(event.fact, ScaleProposed) else None
    if not isinstance(fact, ScaleProposed) or policy is None or fact.why == "operator":
        return None
    ledger = watch.ledger
    earlier = ledger.proposals.get(fact.model, ())[:-1]
    lately = [one for one in earlier if event.at - one.at < HOUR]
    if len(lately) >= policy.changes_per_hour and fact.why != "floor":
        return f"{fact.model}: {len(lately)} proposals within the hour, and one more"
    wait_s = policy.up_cooldown_s if fact.after > fact.before else policy.down_cooldown_s
    if not lately or (event.at - lately[-1].at).total_seconds() >= wait_s:
        return None
    return f"{fact.model}: {fact.before} to {fact.after} at {event.at}, the one before was at {lately[-1].at}"
