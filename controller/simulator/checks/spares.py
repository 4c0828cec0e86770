"""Invariants of spares: spares get no requests, and replace lost workers without enlarging the fleet."""

from collections import Counter
from collections.abc import Mapping
from functools import reduce
from itertools import takewhile

from controller.deciders.worker import Worker
from controller.simulator.checks.decisions import OUT
from controller.simulator.checks.watch import Found, InvariantWatch, invariant
from controller.simulator.world.requests.frontends import SimulatedFrontend
from controller.simulator.world.traffic import SimulatedRequest
from events.decisions import HealthStatus, SpareActivated, SpareReleased
from events.fact import Decision, Fact, Recorded
from events.observations import WorkerJoined


@invariant("before", SpareActivated | SpareReleased)
def places_fit(watch: InvariantWatch, event: Recorded, fact: SpareActivated | SpareReleased) -> Found:
    """Only a ready spare replaces a worker, and only a lost worker is replaced.

    A replacement is released only when the replaced worker is ready again. Readiness and loss follow from the events that the
    deciding controller had read.
    """
    workers = _read(watch, event)
    name = fact.replaces if isinstance(fact, SpareActivated) else fact.returned
    worker, other = workers.get(fact.worker), workers.get(name)
    if worker is None or other is None or worker.kind != other.kind:
        yield f"{fact.worker} and {name} are not interchangeable"
    elif isinstance(fact, SpareReleased):
        if worker.spare.place != name or not other.spare.kept or not _ready(other):
            yield f"{fact.worker} does not hold the place of {name}, or {name} is not ready"
    elif not worker.spare.kept or not _ready(worker):
        yield f"{fact.instance}, which takes the place of {name}, is not a ready spare"
    elif other.spare.kept or not _gone(other):
        yield f"{fact.instance} takes the place of {other.joined.instance}, which is {other.health.status}"


def _read(watch: InvariantWatch, event: Recorded) -> Mapping[str, Worker]:
    """Return the workers as the deciding controller knew them.

    The controller knew the events it had read, and the earlier decisions of the same append.
    """
    unread = reversed(watch.world.broker.events[event.through : event.seq - 1])
    batch = [*takewhile(lambda one: isinstance(one.fact, Decision) and one.through == event.through, unread)]
    return reduce(watch.seams.evolve, reversed(batch), watch.shown[event.through]).workers


def _ready(worker: Worker) -> bool:
    health, closed = worker.health, worker.breaker.position == "closed"
    return health.status is HealthStatus.HEALTHY and health.weight == 1.0 and closed


def _gone(worker: Worker) -> bool:
    return worker.health.status in OUT or worker.health.limit == 0.0


@invariant("recorded", SpareActivated | SpareReleased | WorkerJoined)
def places_once(watch: InvariantWatch, event: Recorded, fact: Fact) -> Found:
    """No worker is replaced by two spares at once, and spares never increase the number of serving workers."""
    fleet = watch.shown[-1]
    known = {**fleet.departed, **fleet.workers}
    taken = Counter(worker.spare.place or name for name, worker in known.items() if not worker.spare.kept)
    if twice := [place for place, count in taken.items() if count > 1]:
        yield f"the places of {', '.join(twice)} are taken twice"
    machines = watch.world.machines
    for model in watch.world.scenario.models:
        places = sum(not one.spare.kept for one in known.values() if one.joined.model == model)
        expected = sum(not one.spare for one in machines.values() if one.model == model)
        if places > expected:
            yield f"{places} workers of {model} hold a place, but there are only {expected} places"


@invariant("routed")
def spares_wait(watch: InvariantWatch, frontend: SimulatedFrontend, request: SimulatedRequest) -> Found:
    """No frontend sends a request to a worker that it knows to be a spare."""
    replica = frontend.replica
    worker = watch.shown[replica.known].workers.get(request.worker)
    spare = worker is not None and worker.joined.instance == request.instance and worker.spare.kept
    if spare and replica.whole:
        yield f"{frontend.name} at {replica.known} sent {request.request} to {request.instance}, which is a spare"


@invariant("tick")
def places_filled(watch: InvariantWatch) -> Found:
    """No lost worker remains without a replacement while a spare is ready and a leader is up."""
    steady, workers = watch.steadiness, watch.shown[-1].workers
    ready = [one for one in workers.values() if one.spare.kept and _ready(one) and not one.drain.active]
    for name in watch.world.machines:
        lost = workers.get(name)
        empty = lost is not None and _empty(lost) and any(one.kind == lost.kind for one in ready)
        since = steady.lasts_since("the place is empty", name, so=empty)
        if steady.overdue(since):
            yield f"the place of {name} is empty since {since}, although {len(ready)} spares are ready"


def _empty(lost: Worker) -> bool:
    """Return whether a worker is lost and a spare must therefore replace it."""
    health = lost.health
    dead = health.status is HealthStatus.DEAD and not health.exit.draining
    fallen = dead and health.exit.left != "left: graceful"
    silent = health.status is HealthStatus.UNHEALTHY and bool(health.charges.convictions)
    return (fallen or silent) and not lost.spare.kept
