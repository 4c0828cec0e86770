"""Invariants of folds, which are compared with one another and with the check ledger."""

from collections.abc import Sequence

from controller.deciders.fleet import Fleet
from controller.simulator.checks.watch import InvariantWatch, invariant
from controller.simulator.world.surroundings import Replica
from events.decisions import HealthStatus
from events.fact import Fact, Recorded


@invariant("absorbed")
def folds_agree(watch: InvariantWatch, replica: Replica, batch: Sequence[Recorded]) -> str | None:
    """All processes that have read the journal to the same position have equal folds."""
    seq = replica.seq
    if seq < replica.order.position.decided:  # it has yet to read events that its snapshot had absorbed
        return None
    fold = replica.order.shown
    last, true = watch.compared.get(replica.name), watch.shown[seq]
    watch.compared[replica.name] = (replica, fold, true)
    if watch.agreed.get(seq) is fold:  # another process holds the same object
        return None
    known = (last[1], last[2]) if last is not None and last[0] is replica else None
    found = differs(fold, true, known, f"{replica.name} at {seq}")
    if found is None:
        watch.agreed[seq] = fold
    return found


def differs(actual: Fleet, true: Fleet, known: tuple[Fleet, Fleet] | None, name: str) -> str | None:
    """Return a description of the first difference between two fleets; None if they are equal.

    `known` is a pair of fleets that were compared before. A part that is still the same object in both is skipped.
    """
    heads = [(fleet.number, fleet.policy, fleet.workers.keys()) for fleet in (actual, true)]
    if heads[0] != heads[1]:
        return f"{name}: number {actual.number} for {true.number}, workers {sorted(actual.workers)} for {sorted(true.workers)}"
    was, should = (known[0].workers, known[1].workers) if known is not None else ({}, {})
    for worker_name, worker in actual.workers.items():
        expected = true.workers[worker_name]
        if worker is expected or (was.get(worker_name) is worker and should.get(worker_name) is expected):
            continue
        if worker != expected:
            return f"{name}: {worker_name} is {worker}, should be {expected}"
    for part in ("awaited", "departed", "goldens", "models", "incidents"):
        one, other = getattr(actual, part), getattr(true, part)
        if known is not None and getattr(known[0], part) is one and getattr(known[1], part) is other:
            continue
        if one is not other and one != other:
            return f"{name}: {part} are {one}, should be {other}"
    return None


@invariant("recorded")
def fold_keeps_decisions(watch: InvariantWatch, event: Recorded, fact: Fact) -> str | None:
    """A fold shows each worker in the state of the last decision about it."""
    ledger = watch.ledger
    entry = ledger.entries.get(getattr(fact, "worker", ""))
    if entry is None:
        return None
    shown = watch.shown[-1].workers.get(entry.worker)
    if entry.forgotten:
        return None if shown is None else f"the fold shows {entry.worker}, which was forgotten"
    if shown is None or shown.joined.instance != entry.instance:
        return f"the fold does not show {entry.instance}"
    decided = (entry.status or HealthStatus.SUSPICIOUS, entry.weight, entry.position)
    folded = (shown.health.status, shown.health.weight, shown.breaker.position)
    return None if decided == folded else f"{entry.instance}: decided {decided}, folded {folded}"
