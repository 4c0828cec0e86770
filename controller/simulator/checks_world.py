"""Checks of what is done with the verdicts, and of what the fleet must do about the truth in time."""

from typing import TYPE_CHECKING

from controller.deciders.breaker import Breaker
from controller.simulator.kernel import SECOND, micros, since_start
from controller.simulator.ledger import Page
from controller.simulator.machines import CANARIES, Machine
from controller.simulator.prober import DEADLINE, RETRIES
from events.decisions import HealthStatus

if TYPE_CHECKING:
    from controller.simulator.frontends import Frontend
    from controller.simulator.traffic import Flight
    from controller.simulator.watch import Watch

OUT = (HealthStatus.UNHEALTHY, HealthStatus.DRAINING, HealthStatus.DEAD)
SLACK = 8 * SECOND  # a tick, an append and its retries, and reading
IN_SERVICE = (HealthStatus.HEALTHY, HealthStatus.SUSPICIOUS)
AT_REST = (HealthStatus.DRAINING, HealthStatus.DEAD)


def verdict(watch: "Watch", frontend: "Frontend", flight: "Flight") -> str | None:
    seq = max(frontend.replica.seq, frontend.replica.order.position.decided)
    status = watch.status_at(flight.worker, flight.instance, seq)
    if status in OUT and not _kept(watch, flight, seq):
        return f"{frontend.name} at {seq} sent {flight.request} to {flight.instance}, which is {status}"
    worker = watch.shown[seq].workers.get(flight.worker)
    if frontend.replica.whole and worker is not None and not worker.routable:
        return f"{frontend.name} at {seq} sent {flight.request} to {flight.instance}, which has no weight"
    return None


def _kept(watch: "Watch", flight: "Flight", seq: int) -> bool:
    """Return whether the ejection budget keeps this doubtful worker in service."""
    worker = watch.shown[seq].workers.get(flight.worker)
    return worker is not None and worker.budget.kept is not None and worker.in_doubt


def shedding(watch: "Watch", frontend: "Frontend", flight: "Flight") -> str | None:
    level = watch.shown[frontend.replica.seq].models.get(flight.model)
    if flight.attempt == 1 and level is not None and level.level >= 4 and frontend.replica.whole:
        return f"{frontend.name} sent {flight.request} while {flight.model} is at level {level.level}"
    return None


def own_straggler(
    watch: "Watch", frontend: "Frontend", flight: "Flight", before: Breaker, after: Breaker
) -> str | None:
    by_time = before.position == "open" and after.position == "half_open" and not after.trial
    if flight.sent < before.moved_by and after != before and not by_time:
        return f"{frontend.name}'s breaker of {flight.instance}: {before} became {after} by {flight.request}"
    return None


def silent(watch: "Watch", machine: Machine, instance: str) -> str | None:
    if machine.instance != instance:
        return None
    if machine.beating or watch.world.linked(machine):
        return f"{instance} is called silent: heard {machine.beating}, linked {watch.world.linked(machine)}"
    return None


def corrupt(watch: "Watch") -> str | None:
    for machine in watch.world.machines.values():
        if not machine.condition.corrupt or not machine.up:
            continue
        serving = watch.serving_since.get(machine.instance)
        if serving is None:
            continue
        bound = int(CANARIES * watch.world.scenario.interval * 1.15) + (1 + RETRIES) * DEADLINE // 2 + SLACK
        since = max(serving, machine.corrupt_since, watch.probed_since.get(machine.name, 0))
        if watch.kernel.now - since > bound and _known_answers(watch, machine, since):
            return f"{machine.instance} is corrupt since {machine.corrupt_since / SECOND} s and serves since {serving / SECOND} s"
    return None


def _known_answers(watch: "Watch", machine: Machine, since: int) -> bool:
    """Return whether all that while there was an agreed answer to every canary that it gets wrong."""
    goldens, key = watch.shown[-1].goldens, machine.joined.canary_key
    found = [goldens.get((key, f"c{i}")) for i in machine.condition.corrupt]
    return watch.goldens_since(key) <= since and all(g is not None and g.status == "agreed" for g in found)


def trials(watch: "Watch") -> str | None:
    for page in watch.ledger.pages.values():
        if page.position == "closed" or page.status in AT_REST or page.draining_until is not None:
            continue
        due = page.retry_at if page.position == "open" else page.deadline
        if due is not None and _overdue(watch, since_start(due)):
            return f"{page.instance}'s breaker is {page.position} still, due was {due}"
    return None


def limits(watch: "Watch") -> str | None:
    last = watch.world.broker.last_seq
    for page in watch.ledger.pages.values():
        if page.limited_at is None or page.status not in IN_SERVICE:
            continue
        left = page.limit(last)
        if page.weight > left and _overdue(watch, since_start(page.limited_at)):
            return f"{page.instance} has {page.weight} still, its devices leave it {left} since {page.limited_at}"
    return None


def drains(watch: "Watch") -> str | None:
    margin = micros(watch.policy.drain.margin)
    for page in watch.ledger.pages.values():
        until = page.draining_until
        if until is not None and not _over(page) and _overdue(watch, since_start(until) + margin):
            return f"{page.instance} is draining still, the deadline was {until}"
    return None


def _over(page: Page) -> bool:
    return page.status is HealthStatus.DEAD


def _overdue(watch: "Watch", due: int) -> bool:
    """Return whether a steady leader has had time to see that something is due."""
    if watch.steady_leader is None:
        return False
    clocks = 2 * watch.world.scenario.skew
    return watch.kernel.now - max(due + clocks, watch.steady_since) > SLACK + 5 * SECOND
