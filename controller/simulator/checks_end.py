"""Checks at the end of a run: nothing is lost, and everything is well again."""

from typing import TYPE_CHECKING

from controller.deciders.fleet import Fleet
from controller.simulator.checks_folds import differs
from events.decisions import HealthStatus
from events.order import Order

if TYPE_CHECKING:
    from controller.simulator.watch import Watch

LATE_AT_MOST = 20  # events on their way when the run ends


def replay(watch: "Watch") -> str | None:
    again: Order[Fleet] = Order(watch.seams.evolve, Fleet())
    stored = watch.world.projector.stored
    number = stored[1].number if stored is not None else -1
    for event in watch.world.broker.events:
        if watch.replayed is None and again.position.number == number:
            watch.replayed = again.settled  # for the next check, so that the journal is folded once for both
        again.take(event)
    watch.replayed = watch.replayed or again.settled
    return differs(again.shown, watch.shown[-1], None, "the replay")


def snapshot(watch: "Watch") -> str | None:
    stored = watch.world.projector.stored
    if stored is None:
        return "nothing was ever stored"
    settled, position, _ = stored
    if settled.number != position.number:
        return f"the stored fleet is at decision {settled.number}, its position at {position.number}"
    assert watch.replayed is not None
    return differs(settled, watch.replayed, None, f"the state store at {position}")


def nothing_lost(watch: "Watch") -> str | None:
    said = watch.world.said
    if said.dropped:
        return f"{said.dropped} facts did not fit"
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
    for source, number in said.acknowledged.items():
        missing = set(range(1, number + 1)) - present.get(source, set())
        if missing:
            return f"{source}: facts {sorted(missing)} were acknowledged and are not there"
    return None


def audit(watch: "Watch") -> str | None:
    projector, events = watch.world.projector, watch.world.broker.events
    if projector.stored_seq < len(events) - LATE_AT_MOST:
        return f"the state store is at {projector.stored_seq} of {len(events)}"
    once: dict[str, int] = {}  # a fact that was stored twice has one row
    for event in events[: projector.stored_seq]:
        once.setdefault(event.id, event.seq)
    rows = {id: seq for id, seq in projector.audit.items() if seq <= projector.stored_seq}
    return None if rows == once else f"the audit table holds {len(rows)} of {len(once)} events"


def caught_up(watch: "Watch") -> str | None:
    world, last = watch.world, watch.world.broker.last_seq
    for replica in world.replicas():
        if replica.seq < last - LATE_AT_MOST:
            return f"{replica.name} is at {replica.seq} of {last}"
        if found := differs(replica.fleet, watch.shown[replica.seq], None, replica.name):
            return found
    waiting = [(box.source, len(box)) for box in world.outboxes() if len(box) > 5]
    return f"unsaid facts: {waiting}" if waiting else None


def all_well(watch: "Watch") -> str | None:
    if not watch.world.scenario.settles:
        return None
    for machine in watch.world.machines.values():
        page = watch.ledger.of(machine.name, machine.instance)
        shown = watch.shown[-1].workers.get(machine.name)
        if page is None or shown is None:
            return f"{machine.instance} is not known"
        if page.status is not HealthStatus.HEALTHY or page.position != "closed" or shown.weight < 1.0:
            return f"{machine.instance} is {page.status} ({page.reason}), breaker {page.position}, weight {shown.weight}"
    return None


def incidents(watch: "Watch") -> str | None:
    if not watch.world.scenario.settles:
        return None
    if watch.ledger.incidents or watch.shown[-1].incidents:
        return f"open incidents: {watch.ledger.incidents} {watch.shown[-1].incidents}"
    low = {m: level for m, level in watch.ledger.levels.items() if level}
    return f"levels are left: {low}" if low else None
