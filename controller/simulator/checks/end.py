"""Checks at the end of a run: nothing is lost, and everything is well again."""

from controller.deciders.fleet import Fleet
from controller.simulator.checks.folds import differs
from controller.simulator.checks.watch import InvariantWatch
from events.decisions import HealthStatus
from events.order import Order

LATE_AT_MOST = 20  # events on their way when the run ends


def replay(watch: InvariantWatch) -> str | None:
    """Fold the whole journal from zero and compare with the live fold."""
    again: Order[Fleet] = Order(watch.seams.evolve, Fleet())
    stored = watch.world.projector.stored
    number = stored[1].number if stored is not None else -1
    for event in watch.world.broker.events:
        if watch.replayed is None and again.position.number == number:
            watch.replayed = again.settled  # for the next check, so that the journal is folded once for both
        again.take(event)
    watch.replayed = watch.replayed or again.settled
    return differs(again.shown, watch.shown[-1], None, "the replay")


def snapshot(watch: InvariantWatch) -> str | None:
    """Compare the state store with the fold up to its position."""
    stored = watch.world.projector.stored
    if stored is None:
        return "nothing was ever stored"
    settled, position, _ = stored
    if settled.number != position.number:
        return f"the stored fleet is at decision {settled.number}, its position at {position.number}"
    assert watch.replayed is not None
    return differs(settled, watch.replayed, None, f"the state store at {position}")


def nothing_lost(watch: InvariantWatch) -> str | None:
    """Look for each acknowledged number of each source in the journal."""
    numbers = watch.world.acknowledged
    if numbers.dropped:
        return f"{numbers.dropped} facts did not fit"
    present: dict[str, set[int]] = {}
    folded: dict[str, int] = {}
    for event in watch.world.broker.events:
        if event.source_number:
            present.setdefault(event.source, set()).add(event.source_number)
            if event.source_number > folded.get(event.source, 0) + 1:
                return (
                    f"{event.source}: fact {event.source_number} overtook {folded.get(event.source, 0) + 1}"
                )
            folded[event.source] = max(folded.get(event.source, 0), event.source_number)
    for source, number in numbers.acknowledged.items():
        missing = set(range(1, number + 1)) - present.get(source, set())
        if missing:
            return f"{source}: facts {sorted(missing)} were acknowledged and are not there"
    return None


def audit(watch: InvariantWatch) -> str | None:
    """Compare the audit table with the journal: a row for each event."""
    projector, events = watch.world.projector, watch.world.broker.events
    if projector.stored_seq < len(events) - LATE_AT_MOST:
        return f"the state store is at {projector.stored_seq} of {len(events)}"
    once: dict[str, int] = {}  # a fact that was stored twice has one row
    for event in events[: projector.stored_seq]:
        once.setdefault(event.id, event.seq)
    rows = {id: seq for id, seq in projector.audit.items() if seq <= projector.stored_seq}
    return None if rows == once else f"the audit table holds {len(rows)} of {len(once)} events"


def caught_up(watch: InvariantWatch) -> str | None:
    """Look whether every process has read all but the last few events, and has little left to say."""
    world, last = watch.world, watch.world.broker.last_seq
    for replica in world.replicas():
        if replica.seq < last - LATE_AT_MOST:
            return f"{replica.name} is at {replica.seq} of {last}"
        if found := differs(replica.fleet, watch.shown[replica.seq], None, replica.name):
            return found
    waiting = [(box.source, len(box)) for box in world.outboxes() if len(box) > LATE_AT_MOST]
    return f"unsaid facts: {waiting}" if waiting else None


def all_well(watch: InvariantWatch) -> str | None:
    """Look at every worker: healthy, closed, at full weight. Only where there was time enough."""
    if not watch.world.scenario.settles:
        return None
    machines, heal_at = watch.world.machines, watch.world.scenario.heal_at
    for machine in machines.values():
        if machine.standing.retired or machine.standing.created >= heal_at:
            continue
        entry = watch.ledger.of(machine.name, machine.instance)
        shown = watch.shown[-1].workers.get(machine.name)
        if entry is None or shown is None:
            return f"{machine.instance} is not known"
        weight = shown.health.weight if shown.spare.kept else shown.weight
        if entry.status is not HealthStatus.HEALTHY or entry.position != "closed" or weight < 1.0:
            return f"{machine.instance} is {entry.status} ({entry.reason}), breaker {entry.position}, weight {weight}"
    return None


def incidents(watch: InvariantWatch) -> str | None:
    """Look for open incidents and levels that are left. Only where there was time enough."""
    if not watch.world.scenario.settles:
        return None
    if watch.ledger.incidents or watch.shown[-1].incidents:
        return f"open incidents: {watch.ledger.incidents} {watch.shown[-1].incidents}"
    low = watch.ledger.degraded()
    return f"levels are left: {low}" if low else None
