"""Checks of overload: who waits is served where there is room, the best first, in time or not at all; a refusal is no failure."""

from controller.simulator.checks.watch import InvariantWatch
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.requests.crowd import CrowdedRequests
from controller.simulator.world.requests.traffic import RequestSender, SimulatedRequest
from events.fact import Recorded
from events.observations import RequestAbandoned, RequestMigrated

IDLE = 3 * SECOND  # a worker's next report, and the look that follows


def idle(watch: InvariantWatch) -> str | None:
    """Look for workers that have had room for a while, beside somebody who waits for one."""
    since, now, seen = watch.steadiness.idle_since, watch.kernel.now, set()
    machines = watch.world.machines
    for frontend in watch.world.frontends:
        underway = frontend.underway if frontend.up else None
        if not isinstance(underway, CrowdedRequests):
            continue
        wanted = {waiting.model for waiting in underway.lines if waiting.attempt == 1}
        for machine in machines.values() if wanted else ():
            if machine.model not in wanted or not underway.could_take(machine):
                continue
            seen.add(pair := (frontend.name, machine.instance))
            if now - since.setdefault(pair, now) > IDLE:
                return f"{machine.instance} has room, and at {frontend.name} somebody waits"
    for pair in since.keys() - seen:
        del since[pair]
    return None


def ordered(watch: InvariantWatch, frontend: RequestSender, request: SimulatedRequest) -> str | None:
    """Look whether a request is let in while one of a better tier waits. Who was let in before goes before all who were not."""
    best, waited = frontend.best_waiting(request.model), request.waited
    if waited is None or waited.let_in or best is None or best >= waited.rank:
        return None
    return f"{frontend.name} sent {request.request} of tier {waited.tier} while tier {best} waits"


def in_time(watch: InvariantWatch, frontend: RequestSender, request: SimulatedRequest) -> str | None:
    """Look whether a request is sent that has waited for too long."""
    waited, now = request.waited, watch.kernel.now
    if waited is None or request.attempt > 1 or now <= waited.latest:
        return None
    return f"{frontend.name} sent {request.request}, which was to be sent by {waited.latest / SECOND} s"


def harmless(
    watch: InvariantWatch, frontend: RequestSender, request: SimulatedRequest, before: object, after: object
) -> str | None:
    """Look whether a refusal for want of room is held against a worker."""
    if request.refused:
        return f"{frontend.name} takes it for a failure that {request.instance} had no room for {request.request}"
    return None


def untold(watch: InvariantWatch, event: Recorded) -> str | None:
    """Look whether the journal tells a refusal for want of room as a migration or a loss."""
    fact = event.fact
    if not isinstance(fact, RequestMigrated | RequestAbandoned):
        return None
    instance = fact.source_instance if isinstance(fact, RequestMigrated) else fact.instance
    instance, attempt = (
        (fact.source_instance, fact.attempt - 1) if isinstance(fact, RequestMigrated) else (fact.instance, 1)
    )
    for frontend in watch.world.frontends:
        underway = frontend.underway if frontend.life else None
        if not isinstance(underway, CrowdedRequests):
            continue
        if (fact.request, attempt, instance) in underway.refused:
            return f"{fact.kind()} of {fact.request}: all that was wrong is that {instance} had no room"
    return None


def answered(watch: InvariantWatch) -> str | None:
    """Count the answers: each request has one, or is still being served."""
    world, tally = watch.world, watch.world.tally
    underway = sum(frontend.underway.unanswered() for frontend in world.frontends if frontend.life)
    ends = tally.served + tally.rejected + tally.lost + tally.unserved
    if tally.requests == ends + underway:
        return None
    return f"of {tally.requests} requests {ends} have ended, and {underway} are underway"
