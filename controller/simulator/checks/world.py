"""Invariants of routing, and of the time in which the fleet reacts to the true state of its workers."""

from controller.deciders.breaker import Breaker
from controller.deciders.capacity import fleet_capacity
from controller.deciders.worker import Worker
from controller.simulator.checks.decisions import OUT
from controller.simulator.checks.watch import SLACK, InvariantWatch, invariant
from controller.simulator.world.kernel import SECOND, micros, since_start
from controller.simulator.world.machines import CANARIES, Machine
from controller.simulator.world.prober import DEADLINE, RETRIES
from controller.simulator.world.requests.frontends import SimulatedFrontend
from controller.simulator.world.traffic import SimulatedRequest
from events.decisions import HealthStatus

ROUNDING = 1e-12  # tolerance of a sum of weights
IN_SERVICE = (HealthStatus.HEALTHY, HealthStatus.SUSPICIOUS)
AT_REST = (HealthStatus.DRAINING, HealthStatus.DEAD)


@invariant("routed")
def verdict_obeyed(
    watch: InvariantWatch, frontend: SimulatedFrontend, request: SimulatedRequest
) -> str | None:
    """A request goes to an unhealthy, draining or dead worker only if the ejection budget keeps the worker in service.

    The worker's health is what the frontend had read from the journal.
    """
    seq = frontend.replica.known
    status, worker = watch.status_at(request.instance, seq), watch.shown[seq].workers.get(request.worker)
    if status in OUT and (worker is None or not _kept(worker)):
        return f"{frontend.name} at {seq} sent {request.request} to {request.instance}, which is {status}"
    if frontend.replica.whole and worker is not None and not worker.routable:
        return f"{frontend.name} at {seq} sent {request.request} to {request.instance}, which has no weight"
    return None


def _kept(worker: Worker) -> bool:
    """Return whether the ejection budget keeps a worker in service that would otherwise be out of service."""
    return worker.budget.kept is not None and (worker.in_doubt or worker.serves_suspect)


@invariant("routed")
def shedding_obeyed(
    watch: InvariantWatch, frontend: SimulatedFrontend, request: SimulatedRequest
) -> str | None:
    """No new request of a model is sent while the model's degradation level accepts none.

    A request that was admitted before that level may be sent.
    """
    if request.since < watch.kernel.now:
        return None
    level = watch.shown[frontend.replica.seq].models.get(request.model)
    if request.attempt == 1 and level is not None and level.level >= 4 and frontend.replica.whole:
        return f"{frontend.name} sent {request.request} while {request.model} is at level {level.level}"
    return None


@invariant("judged")
def own_breaker(
    watch: InvariantWatch,
    frontend: SimulatedFrontend,
    request: SimulatedRequest,
    before: Breaker,
    after: Breaker,
) -> str | None:
    """An outcome changes a frontend's breaker only if its request was sent after the breaker's last transition.

    A transition to half-open needs no outcome.
    """
    by_time = before.position == "open" and after.position == "half_open" and not after.trial
    if request.sent >= before.moved_by or after == before or by_time:
        return None
    return f"{frontend.name}'s breaker of {request.instance}: {before} became {after} by {request.request}"


@invariant("accused")
def heard_is_not_silent(watch: InvariantWatch, machine: Machine, instance: str) -> str | None:
    """No worker is reported silent while its heartbeats arrive or a frontend is connected to it."""
    if machine.instance != instance:
        return None
    linked = any(frontend.linked(machine) for frontend in watch.world.frontends)
    heard = f"{instance} is reported silent: heard {machine.beating}, linked {linked}"
    return heard if machine.beating or linked else None


@invariant("tick")
def corruption_fenced(watch: InvariantWatch) -> str | None:
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
        serving = watch.serving_since.get(machine.instance)
        if serving is None:
            continue
        since = max(
            serving,
            machine.condition.corrupt_since,
            steady.probed_since.get(machine.name, 0),
            steady.last_of_model.get(machine.instance, 0),
        )
        if watch.kernel.now - since > bound and _known_answers(watch, machine, since):
            was = machine.condition.corrupt_since / SECOND
            return f"{machine.instance} has been corrupt since {was} s and serving since {serving / SECOND} s"
    return None


def _known_answers(watch: InvariantWatch, machine: Machine, since: int) -> bool:
    """Return whether each canary that a machine answers wrongly has had an agreed golden since time `since`."""
    goldens, key = watch.shown[-1].goldens, machine.joined.canary_key
    found = [goldens.get((key, f"c{i}")) for i in machine.condition.corrupt]
    return watch.goldens_moved.get(key, 0) <= since and all(
        g is not None and g.status == "agreed" for g in found
    )


@invariant("tick")
def canaries_leave_one(watch: InvariantWatch) -> str | None:
    """Failed canaries and new lineages alone never leave a model without a serving worker."""
    steady, workers = watch.steadiness, watch.shown[-1].workers.values()
    for model in watch.world.scenario.models:
        of_model = [worker for worker in workers if worker.joined.model == model]
        suspects = [w.joined.worker for w in of_model if w.suspect and w.health.limit > 0.0]
        unserved = bool(suspects) and not any(worker.routable for worker in of_model)
        since = steady.lasts_since("canaries alone", model, so=unserved)
        if steady.overdue(since):
            return (
                f"no worker of {model} has served since {since / SECOND} s, and canaries keep {suspects} out"
            )
    return None


@invariant("tick")
def acquitted_are_tried(watch: InvariantWatch) -> str | None:
    """A worker gets a trial at once when the goldens that convicted it are outvoted, while a leader is up."""
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
            return f"{instance} was acquitted at {since / SECOND} s, but its breaker is still open"
    return None


@invariant("tick")
def trials_end(watch: InvariantWatch) -> str | None:
    """The transition of an open or half-open breaker happens when it is due, while a leader is up."""
    for entry in watch.entries():
        if entry.position == "closed" or entry.status in AT_REST or entry.draining_until is not None:
            continue
        if entry.due is not None and watch.steadiness.overdue(since_start(entry.due)):
            return f"{entry.instance}'s breaker is still {entry.position}, it was due at {entry.due}"
    return None


@invariant("tick")
def limits_decided(watch: InvariantWatch) -> str | None:
    """A worker's weight is reduced soon after its devices limit it, while a leader is up."""
    last = watch.world.broker.last_seq
    for entry in watch.entries():
        if entry.limited_at is None or entry.status not in IN_SERVICE:
            continue
        left = entry.limit(last)
        if entry.weight > left and watch.steadiness.overdue(since_start(entry.limited_at)):
            return f"{entry.instance} still has {entry.weight}, its devices have allowed {left} since {entry.limited_at}"
    return None


@invariant("tick")
def full_capacity(watch: InvariantWatch) -> str | None:
    """No degradation level lasts beyond the dwell while all workers of a model serve fully and meet the SLO."""
    steady, policy, workers = watch.steadiness, watch.policy.degradation, watch.shown[-1].workers.values()
    for model in watch.world.scenario.models:
        level, slo = watch.ledger.levels[model], policy.slo(model)
        expected = [w for w in workers if w.joined.model == model and w.expected]
        ratio = 0.0
        if (
            slo is not None
            and slo.slo_throughput_rps
            and expected
            and all(w.carries == 1.0 for w in expected)
        ):
            capacity = fleet_capacity([(worker.joined.profile, 1.0) for worker in expected], slo)
            ratio = capacity.effective_capacity_rps / slo.slo_throughput_rps
        carried = ratio >= policy.entries[0] - ROUNDING
        since = steady.lasts_since("full capacity", model, so=carried and level > 0)
        if steady.overdue(since + micros(policy.dwell)):
            return f"{model} has been at level {level} with {ratio:.6f} of its objective since {since}"
    return None


@invariant("tick")
def drains_end(watch: InvariantWatch) -> str | None:
    """Every drain ends by its deadline, while a leader is up."""
    margin = micros(watch.policy.drain.margin)
    for entry in watch.entries():
        until = entry.draining_until
        if until is None or entry.status is HealthStatus.DEAD:
            continue
        if watch.steadiness.overdue(since_start(until) + margin):
            return f"{entry.instance} is still draining, the deadline was {until}"
    return None
