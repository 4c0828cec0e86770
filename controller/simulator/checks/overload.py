"""Invariants of overload: requests are admitted by tier and in time, and a rejection is no failure."""

from controller.simulator.checks.watch import Found, InvariantWatch, invariant
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.requests.frontends import SimulatedFrontend
from controller.simulator.world.traffic import SimulatedRequest
from events.fact import Recorded
from events.observations import RequestAbandoned, RequestMigrated

IDLE = 3 * SECOND  # a worker's next report, and the tick that follows


@invariant("tick")
def room_is_used(watch: InvariantWatch) -> Found:
    """No worker has a free slot for longer than a few seconds while a request that it could serve is queued.

    The limit, IDLE, covers the time until the worker's next report and the frontend's next tick.
    """
    steady, machines = watch.steadiness, watch.world.machines
    for frontend in watch.world.frontends:
        if not frontend.life or not frontend.crowded:
            continue
        waiting_for = {one.model for one in frontend.waiting() if frontend.up and one.attempt == 1}
        for machine in machines.values():
            idle = machine.model in waiting_for and frontend.could_serve(machine)
            since = steady.lasts_since("idle", frontend.name, machine.instance, so=idle)
            if watch.kernel.now - since > IDLE:
                yield f"{machine.instance} has room, and a request waits at {frontend.name}"


@invariant("routed")
def tiers_ordered(watch: InvariantWatch, frontend: SimulatedFrontend, request: SimulatedRequest) -> Found:
    """No new request is sent to a worker while a request of a better tier is queued for the same model.

    A request that has already been sent to a worker once is exempt, because it has precedence over all new requests.
    """
    best = frontend.best_waiting(request.model)
    if not request.sent_times and best is not None and best < request.rank:
        yield f"{frontend.name} sent {request.request} of tier {request.tier} while tier {best} waits"


@invariant("routed")
def late_is_not_sent(watch: InvariantWatch, frontend: SimulatedFrontend, request: SimulatedRequest) -> Found:
    """No new request is sent to a worker after the request's queue timeout."""
    if request.attempt == 1 and watch.kernel.now > request.latest:
        yield f"{frontend.name} sent {request.request}, which had to be sent by {request.latest / SECOND} s"


@invariant("judged")
def refusal_is_no_fault(
    watch: InvariantWatch, frontend: SimulatedFrontend, request: SimulatedRequest, *breakers: object
) -> Found:
    """The rejection of a request by a full worker does not change the frontend's breaker of this worker."""
    if (request.request, request.attempt, request.instance) in frontend.refused:
        yield f"{frontend.name} counts as a failure that {request.instance} had no room for {request.request}"


@invariant("recorded", RequestMigrated | RequestAbandoned)
def refusal_is_no_failure(
    watch: InvariantWatch, event: Recorded, fact: RequestMigrated | RequestAbandoned
) -> Found:
    """A rejection by a full worker is reported neither as a migration nor as an abandoned request."""
    instance = fact.source_instance if isinstance(fact, RequestMigrated) else fact.instance
    attempt = fact.attempt - 1 if isinstance(fact, RequestMigrated) else 1
    for frontend in watch.world.frontends:
        if (fact.request, attempt, instance) in frontend.refused:
            yield f"{fact.kind()} of {fact.request}: {instance} only had no room"


@invariant("end")
def requests_accounted_for(watch: InvariantWatch) -> Found:
    """Each request is either in progress or has exactly one outcome: served, rejected, lost or unserved."""
    world, tally = watch.world, watch.world.tally
    underway = sum(frontend.unanswered() for frontend in world.frontends if frontend.up)
    ends = tally.served + tally.rejected + tally.lost + tally.unserved
    if tally.requests != ends + underway:
        yield f"of {tally.requests} requests {ends} have ended, and {underway} are underway"
