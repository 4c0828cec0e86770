"""Invariants at the end of a run: no fact is lost, and the fleet has recovered from all faults."""

from collections import Counter

from controller.deciders.fleet import Fleet
from controller.simulator.checks.folds import differs
from controller.simulator.checks.watch import Found, InvariantWatch, invariant
from events.decisions import HealthStatus
from events.order import Order

LATE_AT_MOST = 20  # events still in transit when the run ends


@invariant("end")
def replay_equals_live(watch: InvariantWatch) -> Found:
    """The fleet state replayed from the journal's beginning equals the state that was computed during the run."""
    again: Order[Fleet] = Order(watch.seams.evolve, Fleet())
    stored = watch.world.stored
    number = stored.position.number if stored is not None else -1
    for event in watch.world.broker.events:
        if watch.replayed is None and again.position.number == number:
            watch.replayed = again.settled  # kept for the next check, so that the journal is folded only once
        again.take(event)
    watch.replayed = watch.replayed or again.settled
    yield from differs(again.shown, watch.shown[-1], None, "the replay")


@invariant("end")
def snapshot_equals_replay(watch: InvariantWatch) -> Found:
    """The fleet state in the state store equals a replay of the journal up to the stored position."""
    stored = watch.world.stored
    if stored is None:
        yield "nothing was ever stored"
        return
    fleet, position = stored.fleet, stored.position
    if fleet.number != position.number:
        yield f"the stored fleet is at decision {fleet.number}, its position at {position.number}"
    assert watch.replayed is not None
    yield from differs(fleet, watch.replayed, None, f"the state store at {position}")


@invariant("end")
def nothing_lost(watch: InvariantWatch) -> Found:
    """Every acknowledged fact is on the journal, and no fact was dropped."""
    broker = watch.world.broker
    if broker.dropped:
        yield f"{broker.dropped} facts were dropped"
    # By source. A number is stored only after all lower ones, so no lower number is missing.
    folded = Counter[str]()
    for event in broker.events:
        if event.source_number > folded[event.source] + 1:
            yield f"{event.source}: fact {event.source_number} overtook {folded[event.source] + 1}"
        folded[event.source] = max(folded[event.source], event.source_number)
    for source, number in broker.acknowledged.items():
        if missing := [*range(folded[source] + 1, number + 1)]:
            yield f"{source}: facts {missing} were acknowledged and are not on the journal"


@invariant("end")
def once_in_the_audit(watch: InvariantWatch) -> Found:
    """The audit table holds every event exactly once."""
    projector, events = watch.world.projector, watch.world.broker.events
    if projector.stored_seq < len(events) - LATE_AT_MOST:
        yield f"the state store is at {projector.stored_seq} of {len(events)}"
    once: dict[str, int] = {}  # a fact that the journal stored twice has one row
    for event in events[: projector.stored_seq]:
        once.setdefault(event.id, event.seq)
    rows = {id: seq for id, seq in projector.audit.items() if seq <= projector.stored_seq}
    if rows != once:
        yield f"the audit table holds {len(rows)} of {len(once)} events"


@invariant("end")
def processes_caught_up(watch: InvariantWatch) -> Found:
    """Every running process has read the journal, has the right fleet state, and has published its facts.

    For each process, a small number (LATE_AT_MOST) of unread events and of unpublished facts is allowed.
    """
    world, last = watch.world, watch.world.broker.last_seq
    reading = (*world.controllers, *world.frontends, world.projector)
    for replica in (process.replica for process in reading if process.up):
        if replica.seq < last - LATE_AT_MOST:
            yield f"{replica.name} is at {replica.seq} of {last}"
        yield from differs(replica.fleet, watch.shown[replica.seq], None, replica.name)
    publishing = (*world.controllers, *world.frontends, *world.planners)
    boxes = [process.outbox for process in publishing if process.up]
    boxes += [machine.outbox for machine in world.machines.values() if machine.up]
    boxes += [world.scaling.outbox] if world.scaling is not None else []
    waiting = [(box.source, len(box)) for box in boxes if len(box) > LATE_AT_MOST]
    if waiting:
        yield f"unpublished facts: {waiting}"


@invariant("end")
def all_well(watch: InvariantWatch) -> Found:
    """After every fault is healed, every worker becomes healthy again at full weight.

    A run is checked only if the time between the last fault and the end suffices to recover (`Scenario.settles`).
    """
    if not watch.world.scenario.settles:
        return
    machines, heal_at = watch.world.machines, watch.world.scenario.heal_at
    for machine in machines.values():
        if machine.retired or machine.created >= heal_at:
            continue
        entry = watch.ledger.of(machine.name, machine.instance)
        shown = watch.shown[-1].workers.get(machine.name)
        if entry is None or shown is None:
            yield f"{machine.instance} is not known"
            return
        weight = shown.health.weight if shown.spare.kept else shown.weight
        if entry.status is not HealthStatus.HEALTHY or entry.position != "closed" or weight < 1.0:
            yield f"{machine.instance} is {entry.status} ({entry.reason}), breaker {entry.position}, weight {weight}"


@invariant("end")
def incidents_closed(watch: InvariantWatch) -> Found:
    """After every fault is healed, every incident is closed and every model is at degradation level 0.

    A run is checked only if the time between the last fault and the end suffices to recover (`Scenario.settles`).
    """
    if not watch.world.scenario.settles:
        return
    ledger, shown = watch.ledger, watch.shown[-1]
    if ledger.incidents or shown.incidents:
        yield f"open incidents: {ledger.incidents} {shown.incidents}"
    low = {model: level for model, level in ledger.levels.items() if level}
    if low:
        yield f"levels are not 0: {low}"
