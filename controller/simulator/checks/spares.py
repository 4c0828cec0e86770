"""Checks of spares: they wait, they take places that are empty, and as many serve as did before."""

from collections import Counter

from controller.deciders.worker import Worker
from controller.simulator.checks.watch import InvariantWatch
from controller.simulator.checks.world import OUT, overdue
from controller.simulator.world.requests.traffic import RequestSender, SimulatedRequest
from events.decisions import HealthStatus, SpareActivated, SpareReleased
from events.fact import Decision, Recorded
from events.observations import WorkerJoined


def waits(watch: InvariantWatch, frontend: RequestSender, request: SimulatedRequest) -> str | None:
    """Look whether a request went to a worker that its frontend knows to be a spare."""
    seq = max(frontend.replica.seq, frontend.replica.order.position.decided)
    worker = watch.shown[seq].workers.get(request.worker)
    if worker is None or not frontend.replica.whole or worker.joined.instance != request.instance:
        return None
    if worker.spare.kept:
        return f"{frontend.name} at {seq} sent {request.request} to {request.instance}, which is a spare"
    return None


def fits(watch: InvariantWatch, event: Recorded) -> str | None:
    """Look at who takes whose place, as its controller knew them."""
    fact = event.fact
    if not isinstance(fact, SpareActivated | SpareReleased):
        return None
    workers, name = _read(watch, event), getattr(fact, "replaces", "") or getattr(fact, "returned", "")
    worker, other = workers.get(fact.worker), workers.get(name)
    if worker is None or other is None or worker.kind != other.kind:
        return f"{fact.worker} and {name} cannot serve in one another's place"
    if isinstance(fact, SpareReleased):
        released = worker.spare.place == name and other.spare.kept and _ready(other)
        return None if released else f"{name} has no place that {fact.worker} could give back, or is not well"
    if not worker.spare.kept or not _ready(worker):
        return f"{fact.instance}, which takes the place of {name}, is no spare that is ready"
    if other.spare.kept or not _gone(other):
        return f"{fact.instance} takes the place of {other.joined.instance}, which is {other.health.status}"
    return None


def _read(watch: InvariantWatch, event: Recorded) -> dict[str, Worker]:
    """Return the workers as whoever decided this knew them: what it had read, and what it has decided in the same breath."""
    fleet, batch = watch.shown[event.through], list[Recorded]()
    for earlier in reversed(watch.world.broker.events[event.through : event.seq - 1]):
        if not isinstance(earlier.fact, Decision) or earlier.through != event.through:
            break
        batch.append(earlier)
    for earlier in reversed(batch):
        fleet = watch.seams.evolve(fleet, earlier)
    return dict(fleet.workers)


def _ready(worker: Worker) -> bool:
    health = worker.health
    return (
        health.status is HealthStatus.HEALTHY and health.weight == 1.0 and worker.breaker.position == "closed"
    )


def _gone(worker: Worker) -> bool:
    return worker.health.status in OUT or worker.health.limit == 0.0


def places(watch: InvariantWatch, event: Recorded) -> str | None:
    """Count the places: none is taken twice, and there are as many as there were."""
    if not isinstance(event.fact, SpareActivated | SpareReleased | WorkerJoined):
        return None
    fleet = watch.shown[-1]
    known = {**fleet.departed, **fleet.workers}
    taken = Counter(worker.spare.place or name for name, worker in known.items() if not worker.spare.kept)
    if twice := [place for place, count in taken.items() if count > 1]:
        return f"the places of {', '.join(twice)} are taken twice"
    machines = watch.world.machines
    for model in watch.world.scenario.models:
        there = sum(not one.spare.kept for one in known.values() if one.joined.model == model)
        wanted = sum(not one.hardware.spare for one in machines.values() if one.model == model)
        if there > wanted:
            return f"{there} workers of {model} have a place, of which there are {wanted}"
    return None


def filled(watch: InvariantWatch) -> str | None:
    """Look for places that stay empty beside a spare that could take them."""
    workers, since, now = watch.shown[-1].workers.values(), watch.steadiness.empty_since, watch.kernel.now
    ready = [one for one in workers if one.spare.kept and _ready(one) and not one.drain.active]
    empty = set()
    for lost in workers if ready else ():
        dead = lost.health.status is HealthStatus.DEAD and not lost.health.exit.draining
        fallen = dead and lost.health.exit.left != "left: graceful"
        silent = lost.health.status is HealthStatus.UNHEALTHY and bool(lost.health.convictions)
        if (fallen or silent) and not lost.spare.kept and any(one.kind == lost.kind for one in ready):
            empty.add(lost.joined.worker)
    for name in since.keys() - empty:
        del since[name]
    for name in empty:
        if overdue(watch, since.setdefault(name, now)):
            return f"the place of {name} is empty since {since[name]}, beside {len(ready)} spares"
    return None
