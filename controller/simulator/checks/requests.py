"""Invariants of the request state machine (`--live-requests`).

The invariants compare each step with `RequestLedger`, an independent record of the request's history.
"""

from collections.abc import Iterator

from controller.frontend.request import effects as do
from controller.frontend.request import events as on
from controller.simulator.checks.ledger import MachineStep, RequestLedger
from controller.simulator.checks.watch import Found, InvariantWatch, invariant
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.requests.live_requests import LiveFrontend
from controller.simulator.world.traffic import SimulatedRequest, SimulatedStream

SLACK_S = 3.0  # a tick of one second, and a worker that has just joined
GIVEN_UP = ("budget_exhausted", "no_worker", "all_workers_failed", "over_cap", "guided_decoding")


# --- after each step ------------------------------------------------------------------------------------------------


@invariant("stepped")
def request_ends(watch: InvariantWatch, step: MachineStep) -> Found:
    """Every request ends exactly once, and has no effects after its end."""
    ledger, request, event, effects = step
    ends = sum(isinstance(one, do.Complete | do.Refuse | do.End) for one in effects)
    if ledger.ends and effects:
        yield f"{request.request} has ended, but {event} leads to {effects}"
    over = request.state.phase == "done"
    if ends + ledger.ends != over or (isinstance(event, on.ClientGone) and not over):
        yield f"{request.request} is {request.state.phase} after {event}, and has ended {ends + ledger.ends} times"


@invariant("stepped")
def request_budget(watch: InvariantWatch, step: MachineStep) -> Found:
    """No request is sent more often than its migration budget allows."""
    ledger, request, event, effects = step
    limit = request.state.terms.migration_limit
    if isinstance(event, on.Sent) and not ledger.free and ledger.paid > limit:
        yield f"{request.request} is sent {ledger.paid + 1} times, but its budget is 1 + {limit}"
    if do.ReportAbandoned("budget_exhausted") in effects and ledger.paid <= limit:
        yield f"{request.request} is abandoned after {ledger.paid} attempts, but its budget is 1 + {limit}"


@invariant("stepped")
def request_excluded(watch: InvariantWatch, step: MachineStep) -> Found:
    """No request is sent again to a worker at which the request failed before."""
    ledger, request, event, effects = step
    if isinstance(event, on.Sent) and event.server.key in ledger.failed:
        yield f"{request.request} is sent to {event.server.key[1]}, which failed it before"
    for effect in effects:
        if isinstance(effect, do.SelectWorker) and not ledger.tried <= effect.avoid:
            yield f"{request.request} may go to {sorted(ledger.tried - effect.avoid)}, where it was tried before"


@invariant("stepped")
def request_first_failure(watch: InvariantWatch, step: MachineStep) -> Found:
    """If a request is given up, the error sent to its client is the first failure after the last token."""
    ledger, request, _, effects = step
    if ledger.first is None or not any(do.ReportAbandoned(reason) in effects for reason in GIVEN_UP):
        return
    error = next((one.error for one in effects if isinstance(one, do.End)), None)
    if error is None or error.code != ledger.first.error.code:
        yield f"{request.request} ends with {error}, but the first failure was {ledger.first}"


@invariant("stepped")
def request_outages(watch: InvariantWatch, step: MachineStep) -> Found:
    """Each outage of a request begins with a failure, and ends once: with the next token or with the request."""
    ledger, request, event, effects = step
    outage = ledger.outage
    for effect in effects:
        if isinstance(effect, do.CountRestored) and not outage:
            yield f"{request.request}: an outage ends that never began"
        outage = isinstance(effect, do.CountFailure) or (outage and not isinstance(effect, do.CountRestored))
    if outage and (isinstance(event, on.FirstToken) or request.state.phase == "done"):
        yield f"{request.request}: its outage continues after {event}"


@invariant("stepped")
def request_reports(watch: InvariantWatch, step: MachineStep) -> Found:
    """Each migration after which a token arrived is reported exactly once."""
    ledger, request, event, effects = step
    reports = sum(isinstance(one, do.ReportMigrated) for one in effects)
    if isinstance(event, on.FirstToken) and reports != ledger.moving:
        yield f"{request.request}: {reports} reports of its migration"
    if reports and not ledger.moving:
        yield f"{request.request}: a migration is reported, but it has not moved"


@invariant("stepped")
def request_policy(watch: InvariantWatch, step: MachineStep) -> Found:
    """Tokens that may be wrong are handled according to the request's corruption policy."""
    ledger, request, event, effects = step
    if not isinstance(event, on.Exposed) or ledger.ends:
        return
    setting, shown = ledger.before.terms.on_corruption, event.answer.reached > event.first
    ended = any(isinstance(one, do.End) and one.error is not None for one in effects)
    if ended != (setting == "error" or (setting == "restart" and shown)):
        yield f"{request.request} ({setting}, shown: {shown}) after {event}: {effects}"
    kept = any(isinstance(one, do.Rewind) for one in effects)
    if not ended and not shown and not event.stays and not kept:
        yield f"{request.request} keeps tokens that may be wrong, although its client has none of them"


@invariant("stepped")
def request_state(watch: InvariantWatch, step: MachineStep) -> Found:
    """The fields of a request's state are consistent with one another and with the previous state."""
    ledger, request, event, _ = step
    state, before = request.state, ledger.before
    at_worker = state.phase in ("running", "judging")
    if (
        (state.attempt is not None) != at_worker
        or (state.failing is not None) > (state.phase == "judging")
        or (state.transfer is not None and not at_worker)
        or (state.has_output and not state.begun)
        or (before.begun and not state.begun)
        or (before.disturbed and not state.disturbed)
        or (before.spoilt and not state.spoilt)
    ):
        yield f"{request.request} after {event}: {state}"


# --- tokens and the end --------------------------------------------------------------------------------------------


@invariant("said")
def request_tokens(watch: InvariantWatch, request: SimulatedRequest, stream: SimulatedStream) -> Found:
    """No token of an answer is lost, repeated or altered between the workers and the client."""
    accepted, shown = request.accepted, request.shown
    positions = [token if token >= 0 else -1 - token for token in accepted]
    if positions != list(range(len(accepted))):
        yield f"{request.request} has tokens {accepted}"
    if shown != accepted[: len(shown)]:
        yield f"{request.request}: its client has {shown}, but {accepted} were accepted"


@invariant("said")
def request_reads(watch: InvariantWatch, request: SimulatedRequest, stream: SimulatedStream) -> Found:
    """A frontend accepts tokens of a request only from the request's current attempt."""
    if request.state.phase == "done" or stream is not request.stream:
        yield f"{stream.key[1]} sends a token of {request.request}, which has left it"


@invariant("ended")
def request_whole(watch: InvariantWatch, request: SimulatedRequest, frontend: LiveFrontend) -> Found:
    """An answer that ends as complete has all its tokens, and no ended request is still at a worker."""
    state, shown = request.state, request.shown
    if request in frontend.requests or any(stream.open for stream in request.streams):
        yield f"{request.request} has ended, but is still at {request.instance}"
    if request.finished and len(shown) != state.terms.max_tokens:
        yield f"{request.request} ended as complete with {len(shown)} of {state.terms.max_tokens} tokens"


# --- each second ----------------------------------------------------------------------------------------------------


@invariant("tick")
def request_resumes(watch: InvariantWatch) -> Found:
    """A request without a worker continues soon after a worker that it has not tried could serve it.

    The time limit is a few seconds (SLACK_S).
    """
    now, machines = watch.kernel.now, watch.world.machines
    for frontend, request, ledger in _live(watch):
        state = request.state
        untried = (one for one in machines.values() if (one.name, one.instance) not in ledger.tried)
        waits = state.phase in ("parked", "rerouting") and now / SECOND > state.not_before
        could = waits and any(one.model == request.model and frontend.could_serve(one) for one in untried)
        since = watch.steadiness.lasts_since("could resume", request.request, so=could)
        if now - since > SLACK_S * SECOND:
            yield f"{request.request} waits since {since / SECOND} s, although a worker could serve it"


@invariant("tick")
def request_waits(watch: InvariantWatch) -> Found:
    """No request waits for a worker, or for its first token, longer than its time limit."""
    now = watch.kernel.now / SECOND
    for _, request, ledger in _live(watch):
        state, since = request.state, ledger.waits_since
        terms = state.terms
        if since is not None and state.phase == "parked" and now - since > terms.reroute_s + SLACK_S:
            yield f"{request.request} is parked and has had no worker since {since} s"
        if state.phase != "new" and not state.begun and now - state.began_at > terms.first_token_s + SLACK_S:
            yield f"{request.request} has received no token since {state.began_at} s"


def _live(watch: InvariantWatch) -> Iterator[tuple[LiveFrontend, SimulatedRequest, RequestLedger]]:
    for frontend in watch.world.frontends:
        if frontend.up and isinstance(frontend, LiveFrontend):
            for request in frontend.live:
                if request in watch.requests:
                    yield frontend, request, watch.requests[request]
