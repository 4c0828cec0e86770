"""Checks of the folds: against one another, and against the ledger."""

from collections.abc import Sequence

from controller.deciders.fleet import Fleet
from controller.simulator.checks.watch import InvariantWatch, invariant
from controller.simulator.world.replica import Replica
from events.decisions import HealthStatus
from events.fact import Fact, Recorded


@invariant("absorbed")
def folds_agree(watch: InvariantWatch, replica: Replica, batch: Sequence[Recorded]) -> str | None:
    """Every fold at the same position is the same."""
    seq = replica.seq
    if seq < replica.order.position.decided:  # it has not read up to what its snapshot had already absorbed
        return None
    mine = replica.order.shown
    last, true = watch.compared.get(replica.name), watch.shown[seq]
    watch.compared[replica.name] = (replica, mine, true)
    if watch.agreed.get(seq) is mine:  # another process has the very same
        return None
    known = (last[1], last[2]) if last is not None and last[0] is replica else None
    found = differs(mine, true, known, f"{replica.name} at {seq}")
    if found is None:
        watch.agreed[seq] = mine
    return found


def differs(mine: Fleet, true: Fleet, known: tuple[Fleet, Fleet] | None, who: str) -> str | None:
    """Say in what two fleets differ. Where both parts are the same objects in `known`, they were compared before."""
    if mine.number != true.number or mine.policy != true.policy or mine.workers.keys() != true.workers.keys():
        return f"{who}: number {mine.number} for {true.number}, workers {sorted(mine.workers)} for {sorted(true.workers)}"
    was, should = (known[0].workers, known[1].workers) if known is not None else ({}, {})
    for name, worker in mine.workers.items():
        wanted = true.workers[name]
        if worker is wanted or (was.get(name) is worker and should.get(name) is wanted):
            continue
        if worker != wanted:
            return f"{who}: {name} is {worker}, should be {wanted}"
    for part in ("awaited", "departed", "goldens", "models", "incidents"):
        one, other = getattr(mine, part), getattr(true, part)
        if known is not None and getattr(known[0], part) is one and getattr(known[1], part) is other:
            continue
        if one is not other and one != other:
            return f"{who}: {part} are {one}, should be {other}"
    return None


@invariant("recorded")
def fold_keeps_decisions(watch: InvariantWatch, event: Recorded, fact: Fact) -> str | None:
    """A fold shows of each worker what was last decided about it."""
    ledger = watch.ledger
    entry = ledger.entries.get(getattr(fact, "worker", ""))
    if entry is None:
        return None
    shown = watch.shown[-1].workers.get(entry.worker)
    if entry.forgotten:
        return None if shown is None else f"the fold shows {entry.worker}, which is forgotten"
    if shown is None or shown.joined.instance != entry.instance:
        return f"the fold does not show {entry.instance}"
    decided = (entry.status or HealthStatus.SUSPICIOUS, entry.weight, entry.position)
    folded = (shown.health.status, shown.health.weight, shown.breaker.position)
    return None if decided == folded else f"{entry.instance}: decided {decided}, folded {folded}"
