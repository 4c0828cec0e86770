"""Invariants of the request machine (`--live-requests`), checked against the request ledger."""

from collections.abc import Iterator

from controller.frontend.request import effects as do
from controller.frontend.request import events as on
from controller.simulator.checks.ledger import MachineStep, RequestLedger
from controller.simulator.checks.watch import InvariantWatch, invariant
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.requests.live_requests import (
    LiveRequests,
    LiveSimulatedRequest,
    SimulatedStream,
)

SLACK_S = 3.0  # a tick of one second, and a worker that has just joined
GIVEN_UP = ("budget_exhausted", "no_worker", "all_workers_failed", "over_cap", "guided_decoding")


# --- after each step ------------------------------------------------------------------------------------------------


@invariant("stepped")
def request_ends(watch: InvariantWatch, step: MachineStep) -> str | None:
    """Every request ends exactly once, and has no effects after its end."""
    ledger, request, event, effects = step
    ends = sum(isinstance(one, do.Complete | do.Refuse | do.End) for one in effects)
    if ledger.ends and effects:
        return f"{request.request} has ended, but {event} leads to {effects}"
    over = request.state.phase == "done"
    if ends + ledger.ends != over or (isinstance(event, on.ClientGone) and not over):
        return f"{request.request} is {request.state.phase} after {event}, and has ended {ends + ledger.ends} times"
    return None


@invariant("stepped")
def request_budget(watch: InvariantWatch, step: MachineStep) -> str | None:
    """No request is sent more often than its migration budget allows."""
    ledger, request, event, effects = step
    limit = request.state.terms.migration_limit
    if isinstance(event, on.Sent) and not ledger.free and ledger.paid > limit:
        return f"{request.request} is sent {ledger.paid + 1} times, but its budget is 1 + {limit}"
    if do.ReportAbandoned("budget_exhausted") in effects and ledger.paid <= limit:
        return f"{request.request} is abandoned after {ledger.paid} attempts, but its budget is 1 + {limit}"
    return None


@invariant("stepped")
def request_excluded(watch: InvariantWatch, step: MachineStep) -> str | None:
    """No request is sent again to a worker at which it failed before."""
    ledger, request, event, effects = step
    if isinstance(event, on.Sent) and event.server.key in ledger.failed:
        return f"{request.request} is sent to {event.server.key[1]}, which failed it before"
    for effect in effects:
        if isinstance(effect, do.SelectWorker) and not ledger.tried <= effect.avoid:
            return f"{request.request} may go to {sorted(ledger.tried - effect.avoid)}, where it was tried before"
    return None


@invariant("stepped")
def request_first_failure(watch: InvariantWatch, step: MachineStep) -> str | None:
    """A request that is given up reports to its client the first failure since the last token."""
    ledger, request, _, effects = step
    if ledger.first is None or not any(do.ReportAbandoned(reason) in effects for reason in GIVEN_UP):
        return None
    error = next((one.error for one in effects if isinstance(one, do.End)), None)
    if error is None or error.code != ledger.first.error.code:
        return f"{request.request} ends with {error}, but the first failure was {ledger.first}"
    return None


@invariant("stepped")
def request_outages(watch: InvariantWatch, step: MachineStep) -> str | None:
    """Each outage of a request ends exactly once, with the next token or with the request."""
    ledger, request, event, effects = step
    outage = ledger.outage
    for effect in effects:
        if isinstance(effect, do.CountRestored) and not outage:
            return f"{request.request}: an outage ends that never began"
        outage = isinstance(effect, do.CountFailure) or (outage and not isinstance(effect, do.CountRestored))
    if outage and (isinstance(event, on.FirstToken) or request.state.phase == "done"):
        return f"{request.request}: its outage continues after {event}"
    return None


@invariant("stepped")
def request_reports(watch: InvariantWatch, step: MachineStep) -> str | None:
    """Each migration after which a token arrived is reported exactly once."""
    ledger, request, event, effects = step
    reports = sum(isinstance(one, do.ReportMigrated) for one in effects)
    if isinstance(event, on.FirstToken) and reports != ledger.moving:
        return f"{request.request}: {reports} reports of its migration"
    if reports and not ledger.moving:
        return f"{request.request}: a migration is reported, but it has not moved"
    return None


@invariant("stepped")
def request_policy(watch: InvariantWatch, step: MachineStep) -> str | None:
    """Tokens that may be wrong are handled according to the request's corruption policy."""
    ledger, request, event, effects = step
    if not isinstance(event, on.Exposed) or ledger.ends:
        return None
    setting, shown = ledger.before.terms.on_corruption, event.answer.reached > event.first
    ended = any(isinstance(one, do.End) and one.error is not None for one in effects)
    if ended != (setting == "error" or (setting == "restart" and shown)):
        return f"{request.request} ({setting}, shown: {shown}) after {event}: {effects}"
    kept = any(isinstance(one, do.Rewind) for one in effects)
    if not ended and not shown and not event.stays and not kept:
        return f"{request.request} keeps tokens that may be wrong, although its client has none of them"
    return None


@invariant("stepped")
def request_state(watch: InvariantWatch, step: MachineStep) -> str | None:
    """A request's state is consistent with its phase."""
    ledger, request, event, _ = step
    state, before = request.state, ledger.before
    at_worker = state.phase in ("running", "judging")
    wrong = (
        (state.attempt is not None) != at_worker
        or (state.failing is not None) > (state.phase == "judging")
        or (state.transfer is not None and not at_worker)
        or (state.has_output and not state.begun)
        or (before.begun and not state.begun)
        or (before.disturbed and not state.disturbed)
        or (before.spoilt and not state.spoilt)
    )
    return f"{request.request} after {event}: {state}" if wrong else None


# --- tokens and the end --------------------------------------------------------------------------------------------


@invariant("said")
def request_tokens(
    watch: InvariantWatch, request: LiveSimulatedRequest, stream: SimulatedStream
) -> str | None:
    """No token that a client has received is lost, repeated or altered."""
    accepted, shown = request.accepted, request.shown
    positions = [token if token >= 0 else -1 - token for token in accepted]
    if positions != list(range(len(accepted))):
        return f"{request.request} has tokens {accepted}"
    if shown != accepted[: len(shown)]:
        return f"{request.request}: its client has {shown}, but {accepted} were accepted"
    return None


@invariant("said")
def request_reads(
    watch: InvariantWatch, request: LiveSimulatedRequest, stream: SimulatedStream
) -> str | None:
    """The frontend accepts no token from an attempt that the request has left."""
    if request.state.phase == "done" or stream is not request.stream:
        return f"{stream.key[1]} sends a token of {request.request}, which has left it"
    return None


@invariant("ended")
def request_whole(watch: InvariantWatch, request: LiveSimulatedRequest, frontend: LiveRequests) -> str | None:
    """An answer that ends as complete has all its tokens, and no ended request is still at a worker."""
    state, shown = request.state, request.shown
    if request in frontend.requests or any(stream.open for stream in request.streams):
        return f"{request.request} has ended, but is still at {request.instance}"
    if request.finished and len(shown) != state.terms.max_tokens:
        return f"{request.request} ended as complete with {len(shown)} of {state.terms.max_tokens} tokens"
    return None


# --- each second ----------------------------------------------------------------------------------------------------


@invariant("tick")
def request_resumes(watch: InvariantWatch) -> str | None:
    """A parked request continues as soon as a worker can serve it."""
    now, machines = watch.kernel.now, watch.world.machines
    for underway, request, ledger in _live(watch):
        state = request.state
        could = (
            state.phase in ("parked", "rerouting")
            and now / SECOND > state.not_before
            and any(
                machine.model == request.model
                and (machine.name, machine.instance) not in ledger.tried
                and underway.could_serve(machine)
                for machine in machines.values()
            )
        )
        since = ledger.could_resume_since
        ledger.could_resume_since = None if not could else now if since is None else since
        if since is not None and could and now - since > SLACK_S * SECOND:
            return f"{request.request} waits since {since / SECOND} s, although a worker could serve it"
    return None


@invariant("tick")
def request_waits(watch: InvariantWatch) -> str | None:
    """No request waits for a worker, or for its first token, longer than its time limit."""
    now = watch.kernel.now / SECOND
    for _, request, ledger in _live(watch):
        state, since = request.state, ledger.waits_since
        terms = state.terms
        if since is not None and state.phase == "parked" and now - since > terms.reroute_s + SLACK_S:
            return f"{request.request} is parked and has had no worker since {since} s"
        if state.phase != "new" and not state.begun and now - state.began_at > terms.first_token_s + SLACK_S:
            return f"{request.request} has received no token since {state.began_at} s"
    return None


def _live(watch: InvariantWatch) -> Iterator[tuple[LiveRequests, LiveSimulatedRequest, RequestLedger]]:
    for frontend in watch.world.frontends:
        underway = frontend.underway if frontend.up else None
        if isinstance(underway, LiveRequests):
            for request in underway.live.values():
                if request in watch.requests:
                    yield underway, request, watch.requests[request]
