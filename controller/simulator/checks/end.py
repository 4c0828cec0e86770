"""Invariants at the end of a run: no fact is lost, and the fleet has recovered from all faults."""

from collections import Counter

from controller.deciders.fleet import Fleet
from controller.simulator.checks.folds import differs
from controller.simulator.checks.watch import InvariantWatch, invariant
from events.decisions import HealthStatus
from events.order import Order

LATE_AT_MOST = 20  # events still in transit when the run ends


@invariant("end")
def replay_equals_live(watch: InvariantWatch) -> str | None:
    """A fold of the journal from its beginning equals the fold that was computed during the run."""
    again: Order[Fleet] = Order(watch.seams.evolve, Fleet())
    stored = watch.world.projector.stored
    number = stored[1].number if stored is not None else -1
    for event in watch.world.broker.events:
        if watch.replayed is None and again.position.number == number:
            watch.replayed = again.settled  # kept for the next check, so that the journal is folded only once
        again.take(event)
    watch.replayed = watch.replayed or again.settled
    return differs(again.shown, watch.shown[-1], None, "the replay")


@invariant("end")
def snapshot_equals_replay(watch: InvariantWatch) -> str | None:
    """The state store contains the fold of the journal up to the stored position."""
    stored = watch.world.projector.stored
    if stored is None:
        return "nothing was ever stored"
    settled, position, _ = stored
    if settled.number != position.number:
        return f"the stored fleet is at decision {settled.number}, its position at {position.number}"
    assert watch.replayed is not None
    return differs(settled, watch.replayed, None, f"the state store at {position}")


@invariant("end")
def nothing_lost(watch: InvariantWatch) -> str | None:
    """Every acknowledged fact is on the journal, and no fact was dropped."""
    broker = watch.world.broker
    if broker.dropped:
        return f"{broker.dropped} facts were dropped"
    # By source. A number is stored only after all lower ones, so no lower number is missing.
    folded = Counter[str]()
    for event in broker.events:
        if event.source_number > folded[event.source] + 1:
            return f"{event.source}: fact {event.source_number} overtook {folded[event.source] + 1}"
        folded[event.source] = max(folded[event.source], event.source_number)
    for source, number in broker.acknowledged.items():
        if missing := [*range(folded[source] + 1, number + 1)]:
            return f"{source}: facts {missing} were acknowledged and are not on the journal"
    return None


@invariant("end")
def once_in_the_audit(watch: InvariantWatch) -> str | None:
    """The audit table holds every event exactly once."""
    projector, events = watch.world.projector, watch.world.broker.events
    if projector.stored_seq < len(events) - LATE_AT_MOST:
        return f"the state store is at {projector.stored_seq} of {len(events)}"
    once: dict[str, int] = {}  # a fact that the journal stored twice has one row
    for event in events[: projector.stored_seq]:
        once.setdefault(event.id, event.seq)
    rows = {id: seq for id, seq in projector.audit.items() if seq <= projector.stored_seq}
    return None if rows == once else f"the audit table holds {len(rows)} of {len(once)} events"


@invariant("end")
def processes_caught_up(watch: InvariantWatch) -> str | None:
    """Every process has read the whole journal, and has published all of its facts.

    The last LATE_AT_MOST events may still be in transit.
    """
    world, last = watch.world, watch.world.broker.last_seq
    for replica in world.replicas():
        if replica.seq < last - LATE_AT_MOST:
            return f"{replica.name} is at {replica.seq} of {last}"
        if found := differs(replica.fleet, watch.shown[replica.seq], None, replica.name):
            return found
    waiting = [(box.source, len(box)) for box in world.outboxes() if len(box) > LATE_AT_MOST]
    return f"unpublished facts: {waiting}" if waiting else None


@invariant("end")
def all_well(watch: InvariantWatch) -> str | None:
    """After every fault is healed, every worker becomes healthy again at full weight.

    This is checked only if the time after the faults suffices (`Scenario.settles`).
    """
    if not watch.world.scenario.settles:
        return None
    machines, heal_at = watch.world.machines, watch.world.scenario.heal_at
    for machine in machines.values():
        if machine.retired or machine.created >= heal_at:
            continue
        entry = watch.ledger.of(machine.name, machine.instance)
        shown = watch.shown[-1].workers.get(machine.name)
        if entry is None or shown is None:
            return f"{machine.instance} is not known"
        weight = shown.health.weight if shown.spare.kept else shown.weight
        if entry.status is not HealthStatus.HEALTHY or entry.position != "closed" or weight < 1.0:
            return f"{machine.instance} is {entry.status} ({entry.reason}), breaker {entry.position}, weight {weight}"
    return None


@invariant("end")
def incidents_closed(watch: InvariantWatch) -> str | None:
    """After every fault is healed, every incident is closed and every model is at level 0.

    This is checked only if the time after the faults suffices (`Scenario.settles`).
    """
    if not watch.world.scenario.settles:
        return None
    ledger, shown = watch.ledger, watch.shown[-1]
    if ledger.incidents or shown.incidents:
        return f"open incidents: {ledger.incidents} {shown.incidents}"
    low = {model: level for model, level in ledger.levels.items() if level}
    return f"levels are not 0: {low}" if low else None
