"""Invariants of the fleet states that the processes fold from the journal.

The states are compared with one another, and with the check ledger, which is an independent record of the decisions.
"""

from collections.abc import Sequence

from controller.deciders.fleet import Fleet
from controller.simulator.checks.watch import Found, InvariantWatch, invariant
from controller.simulator.world.surroundings import Replica
from events.decisions import HealthStatus
from events.fact import Fact, Recorded


@invariant("absorbed")
def folds_agree(watch: InvariantWatch, replica: Replica, batch: Sequence[Recorded]) -> Found:
    """All processes that have read the journal to the same position have equal fleet states."""
    seq = replica.seq
    if seq < replica.order.position.decided:  # it has yet to read events that its snapshot had absorbed
        return
    fold = replica.order.shown
    last, true = watch.compared.get(replica.name), watch.shown[seq]
    watch.compared[replica.name] = (replica, fold, true)
    if watch.agreed.get(seq) is fold:  # another process holds the same object
        return
    known = (last[1], last[2]) if last is not None and last[0] is replica else None
    yield from differs(fold, true, known, f"{replica.name} at {seq}")
    watch.agreed[seq] = fold  # not reached if they differ, because the first difference ends the run


def differs(actual: Fleet, true: Fleet, known: tuple[Fleet, Fleet] | None, name: str) -> Found:
    """Yield descriptions of the differences between two fleets.

    If their decision numbers, policies or worker names differ, nothing else is compared. `known` is the pair of fleets that was
    compared last. A part is skipped if both fleets still hold the same object for it as in that pair. Each description begins
    with `name`.
    """
    heads = [(fleet.number, fleet.policy, fleet.workers.keys()) for fleet in (actual, true)]
    if heads[0] != heads[1]:
        yield f"{name}: number {actual.number} for {true.number}, workers {sorted(actual.workers)} for {sorted(true.workers)}"
        return
    was, should = (known[0].workers, known[1].workers) if known is not None else ({}, {})
    for worker_name, worker in actual.workers.items():
        expected = true.workers[worker_name]
        if worker is expected or (was.get(worker_name) is worker and should.get(worker_name) is expected):
            continue
        if worker != expected:
            yield f"{name}: {worker_name} is {worker}, should be {expected}"
    for part in ("awaited", "departed", "goldens", "models", "incidents"):
        one, other = getattr(actual, part), getattr(true, part)
        if known is not None and getattr(known[0], part) is one and getattr(known[1], part) is other:
            continue
        if one is not other and one != other:
            yield f"{name}: {part} are {one}, should be {other}"


@invariant("recorded")
def fold_keeps_decisions(watch: InvariantWatch, event: Recorded, fact: Fact) -> Found:
    """The fleet state folded from the journal shows each worker as the last decisions about this worker left it."""
    ledger = watch.ledger
    entry = ledger.entries.get(getattr(fact, "worker", ""))
    if entry is None:
        return
    shown = watch.shown[-1].workers.get(entry.worker)
    if entry.forgotten:
        if shown is not None:
            yield f"the fold shows {entry.worker}, which was forgotten"
        return
    if shown is None or shown.joined.instance != entry.instance:
        yield f"the fold does not show {entry.instance}"
        return
    decided = (entry.status or HealthStatus.SUSPICIOUS, entry.weight, entry.position)
    folded = (shown.health.status, shown.health.weight, shown.breaker.position)
    if decided != folded:
        yield f"{entry.instance}: decided {decided}, folded {folded}"
