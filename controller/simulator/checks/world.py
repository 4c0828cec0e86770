"""Invariants of routing, and of the time in which the fleet reacts to the true state of its workers."""

from controller.deciders.breaker import Breaker
from controller.deciders.capacity import fleet_capacity
from controller.deciders.worker import Worker
from controller.simulator.checks.decisions import OUT
from controller.simulator.checks.watch import SLACK, Found, InvariantWatch, invariant
from controller.simulator.world.controllers import DEADLINE, RETRIES
from controller.simulator.world.kernel import SECOND, micros, since_start
from controller.simulator.world.machines import CANARIES, Machine
from controller.simulator.world.requests.frontends import SimulatedFrontend
from controller.simulator.world.traffic import SimulatedRequest
from events.decisions import HealthStatus

ROUNDING = 1e-12  # tolerance of a sum of weights
IN_SERVICE = (HealthStatus.HEALTHY, HealthStatus.SUSPICIOUS)
AT_REST = (HealthStatus.DRAINING, HealthStatus.DEAD)


@invariant("routed")
def verdict_obeyed(watch: InvariantWatch, frontend: SimulatedFrontend, request: SimulatedRequest) -> Found:
    """No unhealthy, draining or dead worker gets a request, unless the ejection budget keeps it in service.

    The worker's health is taken from the part of the journal that the frontend had read.
    """
    seq = frontend.replica.known
    status = watch.ledger.status_at(request.instance, seq)
    worker = watch.shown[seq].workers.get(request.worker)
    if status in OUT and (worker is None or not _kept(worker)):
        yield f"{frontend.name} at {seq} sent {request.request} to {request.instance}, which is {status}"
    if frontend.replica.whole and worker is not None and not worker.routable:
        yield f"{frontend.name} at {seq} sent {request.request} to {request.instance}, which has no weight"


def _kept(worker: Worker) -> bool:
    """Return whether only the ejection budget keeps a worker in service."""
    return worker.budget.kept is not None and (worker.in_doubt or worker.serves_suspect)


@invariant("routed")
def shedding_obeyed(watch: InvariantWatch, frontend: SimulatedFrontend, request: SimulatedRequest) -> Found:
    """No new request of a model is sent while the model's degradation level accepts none.

    A request that was admitted before the model reached that level may be sent.
    """
    level = watch.shown[frontend.replica.seq].models.get(request.model)
    new = request.since >= watch.kernel.now and request.attempt == 1
    if new and level is not None and level.level >= 4 and frontend.replica.whole:
        yield f"{frontend.name} sent {request.request} while {request.model} is at level {level.level}"


@invariant("judged")
def own_breaker(
    watch: InvariantWatch, frontend: SimulatedFrontend, request: SimulatedRequest, *breakers: Breaker
) -> Found:
    """An outcome changes a frontend's breaker only if its request was sent after the breaker's last transition.

    A transition to half-open needs no outcome.
    """
    before, after = breakers
    by_time = before.position == "open" and after.position == "half_open" and not after.trial
    if request.sent < before.moved_by and after != before and not by_time:
        yield f"{frontend.name}'s breaker of {request.instance}: {before} became {after} by {request.request}"


@invariant("accused")
def heard_is_not_silent(watch: InvariantWatch, machine: Machine, instance: str) -> Found:
    """No worker is reported silent while its heartbeats arrive or a frontend is connected to it."""
    linked = any(frontend.linked(machine) for frontend in watch.world.frontends)
    if machine.instance == instance and (machine.beating or linked):
        yield f"{instance} is reported silent: heard {machine.beating}, linked {linked}"


@invariant("tick")
def corruption_fenced(watch: InvariantWatch) -> Found:
    """A corrupt worker is taken out of service in time, unless no other worker of its model serves.

    The time limit is one round of all canaries, with retries and some slack.
    """
    machines, steady = watch.world.machines, watch.steadiness
    bound = int(CANARIES * watch.world.scenario.interval * 1.15) + (1 + RETRIES) * DEADLINE // 2 + SLACK
    for machine in machines.values():
        if not machine.condition.corrupt or not machine.up:
            continue
        worker = watch.shown[-1].workers.get(machine.name)
        if worker is not None and worker.serves_suspect:
            steady.last_of_model[machine.instance] = watch.kernel.now
        entry = watch.ledger.of(machine.name, machine.instance)
        if entry is None or entry.serving_since is None:
            continue
        serving = since_start(entry.serving_since)
        probed, last = steady.probed_since.get(machine.name, 0), steady.last_of_model.get(machine.instance, 0)
        since = max(serving, machine.condition.corrupt_since, probed, last)
        if watch.kernel.now - since > bound and _known_answers(watch, machine, since):
            was = machine.condition.corrupt_since / SECOND
            yield f"{machine.instance} has been corrupt since {was} s and serving since {serving / SECOND} s"


def _known_answers(watch: InvariantWatch, machine: Machine, since: int) -> bool:
    """Return whether all canaries that a machine answers wrongly have had an agreed golden since time `since`.

    An agreed golden is a stored answer to a canary that enough workers have confirmed.
    """
    goldens, key = watch.shown[-1].goldens, machine.joined.canary_key
    found = (goldens.get((key, f"c{i}")) for i in machine.condition.corrupt)
    agreed = all(golden is not None and golden.status == "agreed" for golden in found)
    return agreed and watch.goldens_moved.get(key, 0) <= since


@invariant("tick")
def canaries_leave_one(watch: InvariantWatch) -> Found:
    """Failed canaries and new lineages never take the last serving worker of a model out of service.

    The lineage of a worker is what its engine reports about its weights and configuration.
    """
    steady, workers = watch.steadiness, watch.shown[-1].workers.values()
    for model in watch.world.scenario.models:
        of_model = [worker for worker in workers if worker.joined.model == model]
        suspects = [w.joined.worker for w in of_model if w.suspect and w.health.limit > 0.0]
        unserved = bool(suspects) and not any(worker.routable for worker in of_model)
        since = steady.lasts_since("canaries alone", model, so=unserved)
        if steady.overdue(since):
            yield f"no worker of {model} has served since {since / SECOND} s, and canaries keep {suspects} out"


@invariant("tick")
def acquitted_are_tried(watch: InvariantWatch) -> Found:
    """If a leader is up, a worker's breaker starts a trial once the goldens that convicted the worker are outvoted."""
    steady = watch.steadiness
    for worker in watch.shown[-1].workers.values():
        instance, breaker, charges = worker.joined.instance, worker.breaker, worker.health.charges
        opened = breaker.moved_by if breaker.position == "open" and not breaker.resting else None
        if worker.health.corrupt:
            steady.convicted_under[instance] = opened
        unmoved = opened is not None and steady.convicted_under.get(instance) == opened
        acquitted = unmoved and bool(charges.acquitted) and not charges.convictions
        since = steady.lasts_since("acquitted", instance, so=acquitted)
        if steady.overdue(since):
            yield f"{instance} was acquitted at {since / SECOND} s, but its breaker is still open"


@invariant("tick")
def trials_end(watch: InvariantWatch) -> Found:
    """While a leader is up, an open or half-open breaker makes its next transition when this transition is due."""
    for entry in watch.entries:
        if entry.position == "closed" or entry.status in AT_REST or entry.draining_until is not None:
            continue
        if entry.due is not None and watch.steadiness.overdue(since_start(entry.due)):
            yield f"{entry.instance}'s breaker is still {entry.position}, it was due at {entry.due}"


@invariant("tick")
def limits_decided(watch: InvariantWatch) -> Found:
    """A worker's weight is reduced soon after its devices limit it, while a leader is up."""
    last = watch.world.broker.last_seq
    for entry in watch.entries:
        if entry.limited_at is None or entry.status not in IN_SERVICE:
            continue
        left = entry.limit(last)
        if entry.weight > left and watch.steadiness.overdue(since_start(entry.limited_at)):
            yield f"{entry.instance} still has {entry.weight}, its devices have allowed {left} since {entry.limited_at}"


@invariant("tick")
def full_capacity(watch: InvariantWatch) -> Found:
    """A model leaves its degradation level in time once its workers have full weight and can meet the SLO.

    The time limit is the policy's `dwell`, the minimum time at a level, and some slack.
    """
    steady, policy, workers = watch.steadiness, watch.policy.degradation, watch.shown[-1].workers.values()
    for model in watch.world.scenario.models:
        level, slo = watch.ledger.levels[model], policy.slo(model)
        expected = [w for w in workers if w.joined.model == model and w.expected]
        ratio, full = 0.0, bool(expected) and all(w.carries == 1.0 for w in expected)
        if slo is not None and slo.slo_throughput_rps and full:
            capacity = fleet_capacity([(worker.joined.profile, 1.0) for worker in expected], slo)
            ratio = capacity.effective_capacity_rps / slo.slo_throughput_rps
        carried = ratio >= policy.entries[0] - ROUNDING
        since = steady.lasts_since("full capacity", model, so=carried and level > 0)
        if steady.overdue(since + micros(policy.dwell)):
            yield f"{model} has been at level {level} with {ratio:.6f} of its objective since {since}"


@invariant("tick")
def drains_end(watch: InvariantWatch) -> Found:
    """Every drain ends by its deadline, while a leader is up."""
    margin = micros(watch.policy.drain.margin)
    for entry in watch.entries:
        until = entry.draining_until
        if until is None or entry.status is HealthStatus.DEAD:
            continue
        if watch.steadiness.overdue(since_start(until) + margin):
            yield f"{entry.instance} is still draining, the deadline was {until}"
