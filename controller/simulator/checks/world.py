"""Checks of what is done with the verdicts, and of what the fleet must do about the truth in time."""

from controller.deciders.breaker import Breaker
from controller.deciders.capacity import fleet_capacity
from controller.simulator.checks.ledger import LedgerEntry
from controller.simulator.checks.watch import InvariantWatch
from controller.simulator.world.kernel import SECOND, micros, since_start
from controller.simulator.world.machines import CANARIES, Machine
from controller.simulator.world.prober import DEADLINE, RETRIES
from controller.simulator.world.requests.traffic import RequestSender, SimulatedRequest
from events.decisions import HealthStatus

OUT = (HealthStatus.UNHEALTHY, HealthStatus.DRAINING, HealthStatus.DEAD)
SLACK = 8 * SECOND  # a tick, an append and its retries, and reading
ROUNDING = 1e-12  # of a sum of weights
IN_SERVICE = (HealthStatus.HEALTHY, HealthStatus.SUSPICIOUS)
AT_REST = (HealthStatus.DRAINING, HealthStatus.DEAD)


def verdict(watch: InvariantWatch, frontend: RequestSender, request: SimulatedRequest) -> str | None:
    """Look whether a request went where the fleet's verdict, as far as the frontend had read, forbids it."""
    seq = max(frontend.replica.seq, frontend.replica.order.position.decided)
    status = watch.status_at(request.worker, request.instance, seq)
    if status in OUT and not _kept(watch, request, seq):
        return f"{frontend.name} at {seq} sent {request.request} to {request.instance}, which is {status}"
    worker = watch.shown[seq].workers.get(request.worker)
    if frontend.replica.whole and worker is not None and not worker.routable:
        return f"{frontend.name} at {seq} sent {request.request} to {request.instance}, which has no weight"
    return None


def _kept(watch: InvariantWatch, request: SimulatedRequest, seq: int) -> bool:
    """Return whether the ejection budget keeps this worker in service: it is in doubt, or canaries alone convict the last one."""
    worker = watch.shown[seq].workers.get(request.worker)
    if worker is None or worker.budget.kept is None:
        return False
    return worker.in_doubt or worker.serves_suspect


def shedding(watch: InvariantWatch, frontend: RequestSender, request: SimulatedRequest) -> str | None:
    """Look whether a new request was sent at the last level, that had not been let in before."""
    level = watch.shown[frontend.replica.seq].models.get(request.model)
    let_in_before = request.waited is not None and request.waited.since < watch.kernel.now
    if let_in_before:
        return None
    if request.attempt == 1 and level is not None and level.level >= 4 and frontend.replica.whole:
        return f"{frontend.name} sent {request.request} while {request.model} is at level {level.level}"
    return None


def own_straggler(
    watch: InvariantWatch,
    frontend: RequestSender,
    request: SimulatedRequest,
    before: Breaker,
    after: Breaker,
) -> str | None:
    """Look whether an outcome from before its last move moved a frontend's own breaker."""
    by_time = before.position == "open" and after.position == "half_open" and not after.trial
    if request.sent < before.moved_by and after != before and not by_time:
        return (
            f"{frontend.name}'s breaker of {request.instance}: {before} became {after} by {request.request}"
        )
    return None


def silent(watch: InvariantWatch, machine: Machine, instance: str) -> str | None:
    """Look whether a worker that is called silent beats, or is linked to a frontend."""
    if machine.instance != instance:
        return None
    if machine.beating or watch.world.linked(machine):
        return f"{instance} is called silent: heard {machine.beating}, linked {watch.world.linked(machine)}"
    return None


def corrupt(watch: InvariantWatch) -> str | None:
    """Look for a corrupt worker that serves longer than its canaries take to find it out. The last worker of a model may."""
    machines, last_of_model = watch.world.machines, watch.steadiness.last_of_model
    for machine in machines.values():
        if not machine.condition.corrupt or not machine.up:
            continue
        worker = watch.shown[-1].workers.get(machine.name)
        if worker is not None and worker.serves_suspect:
            last_of_model[machine.instance] = watch.kernel.now
        serving = watch.serving_since.get(machine.instance)
        if serving is None:
            continue
        bound = int(CANARIES * watch.world.scenario.interval * 1.15) + (1 + RETRIES) * DEADLINE // 2 + SLACK
        since = max(
            serving,
            machine.condition.corrupt_since,
            watch.steadiness.probed_since(machine.name),
            last_of_model.get(machine.instance, 0),
        )
        if watch.kernel.now - since > bound and _known_answers(watch, machine, since):
            was = machine.condition.corrupt_since / SECOND
            return f"{machine.instance} is corrupt since {was} s and serves since {serving / SECOND} s"
    return None


def _known_answers(watch: InvariantWatch, machine: Machine, since: int) -> bool:
    """Return whether all that while there was an agreed answer to every canary that it gets wrong."""
    goldens, key = watch.shown[-1].goldens, machine.joined.canary_key
    found = [goldens.get((key, f"c{i}")) for i in machine.condition.corrupt]
    return watch.goldens_since(key) <= since and all(g is not None and g.status == "agreed" for g in found)


def served(watch: InvariantWatch) -> str | None:
    """Look for a model without a serving worker although canaries alone, or a new lineage, keep one of its workers out."""
    fleet, since, now = watch.shown[-1], watch.steadiness.unserved_since, watch.kernel.now
    for model in watch.world.scenario.models:
        mine = [worker for worker in fleet.workers.values() if worker.joined.model == model]
        suspects = [w.joined.worker for w in mine if w.suspect and w.health.limit > 0.0]
        if not suspects or any(worker.routable for worker in mine):
            since.pop(model, None)
        elif overdue(watch, since.setdefault(model, now)):
            return f"no worker of {model} serves since {since[model] / SECOND} s, and canaries keep {suspects} out"
    return None


def trials(watch: InvariantWatch) -> str | None:
    """Look for breakers that stay open or half-open beyond their time."""
    for entry in watch.entries():
        if entry.position == "closed" or entry.status in AT_REST or entry.draining_until is not None:
            continue
        due = entry.retry_at if entry.position == "open" else entry.deadline
        if due is not None and overdue(watch, since_start(due)):
            return f"{entry.instance}'s breaker is {entry.position} still, due was {due}"
    return None


def acquitted(watch: InvariantWatch) -> str | None:
    """Look for a worker that nothing but outvoted goldens had convicted, and whose breaker has not moved since."""
    steady = watch.steadiness
    for worker in watch.shown[-1].workers.values():
        instance, breaker, charges = worker.joined.instance, worker.breaker, worker.health.charges
        opened = breaker.moved_by if breaker.position == "open" and not breaker.resting else None
        if charges.convictions:
            steady.convicted_under[instance] = opened
        elif charges.acquitted and opened is not None and steady.convicted_under.get(instance) == opened:
            if overdue(watch, steady.acquitted_since.setdefault(instance, watch.kernel.now)):
                since = steady.acquitted_since[instance] / SECOND
                return f"{instance} is acquitted since {since} s, and its breaker is open still"
            continue
        steady.acquitted_since.pop(instance, None)
    return None


def limits(watch: InvariantWatch) -> str | None:
    """Look for weights that are still above what the devices leave."""
    last = watch.world.broker.last_seq
    for entry in watch.entries():
        if entry.limited_at is None or entry.status not in IN_SERVICE:
            continue
        left = entry.limit(last)
        if entry.weight > left and overdue(watch, since_start(entry.limited_at)):
            return f"{entry.instance} has {entry.weight} still, its devices leave it {left} since {entry.limited_at}"
    return None


def full_capacity(watch: InvariantWatch) -> str | None:
    """Look for a model at a level although all of its workers carry their full share, which is its objective or more."""
    fleet, since, now = watch.shown[-1], watch.steadiness.full_since, watch.kernel.now
    policy = watch.policy.degradation
    for model in watch.world.scenario.models:
        slo = policy.slo(model)
        mine = [w for w in fleet.workers.values() if w.joined.model == model and w.expected]
        full = bool(mine) and all(worker.carries == 1.0 for worker in mine)
        if slo is None or not slo.slo_throughput_rps or not full:
            since.pop(model, None)
            continue
        capacity = fleet_capacity([(worker.joined.profile, 1.0) for worker in mine], slo)
        ratio = capacity.effective_capacity_rps / slo.slo_throughput_rps
        if ratio < policy.entries[0] - ROUNDING or not watch.level(model):
            since.pop(model, None)
        elif overdue(watch, since.setdefault(model, now) + micros(policy.dwell)):
            return f"{model} is at level {watch.level(model)} with {ratio:.6f} of its objective since {since[model]}"
    return None


def drains(watch: InvariantWatch) -> str | None:
    """Look for drains that go on beyond their deadline."""
    margin = micros(watch.policy.drain.margin)
    for entry in watch.entries():
        until = entry.draining_until
        if until is not None and not _over(entry) and overdue(watch, since_start(until) + margin):
            return f"{entry.instance} is draining still, the deadline was {until}"
    return None


def _over(entry: LedgerEntry) -> bool:
    return entry.status is HealthStatus.DEAD


def overdue(watch: InvariantWatch, due: int) -> bool:
    """Return whether a steady leader has had time to see that something is due."""
    steady = watch.steadiness
    if steady.leader is None:
        return False
    clocks = 2 * watch.world.scenario.skew
    return watch.kernel.now - max(due + clocks, steady.since) > SLACK + 5 * SECOND
