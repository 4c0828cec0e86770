"""Invariants of overload: requests are admitted by tier and in time, and a rejection is no failure."""

from controller.simulator.checks.watch import InvariantWatch, invariant
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.requests.frontends import SimulatedFrontend
from controller.simulator.world.traffic import SimulatedRequest
from events.fact import Recorded
from events.observations import RequestAbandoned, RequestMigrated

IDLE = 3 * SECOND  # a worker's next report, and the tick that follows


@invariant("tick")
def room_is_used(watch: InvariantWatch) -> str | None:
    """No worker has a free slot while a request that it could serve is waiting, except for a moment.

    The moment lasts until the worker's next report and the frontend's next tick.
    """
    steady, machines = watch.steadiness, watch.world.machines
    for frontend in watch.world.frontends:
        underway = frontend.underway if frontend.life else None
        if underway is None or not underway.crowded:
            continue
        waiting_for = {one.model for one in underway.waiting() if frontend.up and one.attempt == 1}
        for machine in machines.values():
            idle = machine.model in waiting_for and underway.could_serve(machine)
            since = steady.lasts_since("idle", frontend.name, machine.instance, so=idle)
            if watch.kernel.now - since > IDLE:
                return f"{machine.instance} has room, and a request waits at {frontend.name}"
    return None


@invariant("routed")
def tiers_ordered(
    watch: InvariantWatch, frontend: SimulatedFrontend, request: SimulatedRequest
) -> str | None:
    """No request is admitted while a request of a better tier is queued.

    A request that was admitted before, and is sent again, has precedence over all new ones.
    """
    best = frontend.underway.best_waiting(request.model)
    if request.sent_times or best is None or best >= request.rank:
        return None
    return f"{frontend.name} sent {request.request} of tier {request.tier} while tier {best} waits"


@invariant("routed")
def late_is_not_sent(
    watch: InvariantWatch, frontend: SimulatedFrontend, request: SimulatedRequest
) -> str | None:
    """No worker receives a request after the request's queue timeout."""
    if request.attempt > 1 or watch.kernel.now <= request.latest:
        return None
    return f"{frontend.name} sent {request.request}, which had to be sent by {request.latest / SECOND} s"


@invariant("judged")
def refusal_is_no_fault(
    watch: InvariantWatch,
    frontend: SimulatedFrontend,
    request: SimulatedRequest,
    before: object,
    after: object,
) -> str | None:
    """The rejection of a request by a full worker does not change the frontend's breaker of this worker."""
    if (request.request, request.attempt, request.instance) in frontend.refused:
        return (
            f"{frontend.name} counts as a failure that {request.instance} had no room for {request.request}"
        )
    return None


@invariant("recorded", RequestMigrated | RequestAbandoned)
def refusal_is_no_failure(
    watch: InvariantWatch, event: Recorded, fact: RequestMigrated | RequestAbandoned
) -> str | None:
    """A rejection by a full worker is reported neither as a migration nor as an abandoned request."""
    instance, attempt = (
        (fact.source_instance, fact.attempt - 1) if isinstance(fact, RequestMigrated) else (fact.instance, 1)
    )
    for frontend in watch.world.frontends:
        if (fact.request, attempt, instance) in frontend.refused:
            return f"{fact.kind()} of {fact.request}: {instance} only had no room"
    return None


@invariant("end")
def requests_accounted_for(watch: InvariantWatch) -> str | None:
    """Each request is answered, rejected or lost exactly once."""
    world, tally = watch.world, watch.world.tally
    underway = sum(frontend.underway.unanswered() for frontend in world.frontends if frontend.life)
    ends = tally.served + tally.rejected + tally.lost + tally.unserved
    if tally.requests == ends + underway:
        return None
    return f"of {tally.requests} requests {ends} have ended, and {underway} are underway"
