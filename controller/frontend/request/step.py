"""The request state machine: the next state after an event, and the effects to apply. Pure.

    new ── routing ──▶ running ── Finished ──────────────────────────────▶ done
              ▲ │         │ ├── AttemptFailed ──▶ judging ──┬────────────▶ done (its budget is used up, or it is poisonous)
              │ │         │ │                               ├──▶ rerouting ── Resumed ──▶ routing
              │ │         │ │                               └──▶ parked ── Woken ──▶ rerouting
              │ │         │ └── MovedOnPurpose ──▶ routing, or preempted ── Resumed ──▶ routing
              │ │         └── TransferBegun … Switched ──▶ running, at the target
              │ └── NoWorkerFound ──┬── not begun, all are busy ──▶ queued ── Resumed ──▶ routing
              │                     ├── it may crash workers, or a worker may join ──▶ parked
              │                     └── otherwise ────────────────────────────▶ done (the error)
              └── each of queued, rerouting, parked, preempted; ClientGone and Tick end any phase

The phases are those of `state.Phase`, and the other names are events. After a failure the request moves to a worker
on which it has not failed, within its budget. That worker replays the prompt and all accepted tokens. If recovery
fails, the client gets the error of the first failure since the last token. Later failures only occurred during the
recovery from the first one.

The state machine does not process tokens. The driver passes it only the first token of an attempt, failures, control
events and the end of the answer.
"""

from collections.abc import Collection
from math import inf

from msgspec.structs import replace

from controller.frontend.errors import ApiError
from controller.frontend.request import effects as do
from controller.frontend.request import events as on
from controller.frontend.request.effects import Effects
from controller.frontend.request.events import Event
from controller.frontend.request.failures import FULL, Failure, Suspicion
from controller.frontend.request.state import (
    AnswerProgress,
    Attempt,
    Failing,
    Move,
    RequestState,
    TokenGap,
    closed_to,
    may_return,
    refusal,
)
from controller.migration import planned_move
from controller.router.endpoints import Key, Server

POISONOUS = "request_poisonous"
HELD = "held"
NOT_SERVED, NOT_SERVING = "model_not_found", "not_serving"
ALL_BUSY, ALL_CLOSED, ALL_TRIED = "all_workers_busy", "upstream_overloaded", "all_workers_failed"
# pause in seconds before the third and later attempts after broken connections, because the workers of one host fail
# together
PAUSE_S = 0.1
# pause in seconds before a suspect's next attempt, by which time the loss of other workers of a dead host is known
SUSPECT_PAUSE_S = 0.25

Next = tuple[RequestState, Effects]

_FIRST_ROUTE = (do.SelectWorker(),)
_FIRST_TOKEN = (do.Started(first=True),)
_LATER_TOKEN = (do.Started(first=False),)
_LEAVE = do.LeaveWorker()


def step(state: RequestState, event: Event, now: float) -> Next:
    """Return the state after an event, and the effects in the order in which the driver must apply them."""
    if state.phase == "done":
        return state, ()
    # The four events of a request without failures are checked first: `match` on classes costs as much as the transition.
    if type(event) is on.Launched:
        return become_routing(state, event.planned)
    if type(event) is on.Sent:
        return become_running(state, event.server), ()
    if type(event) is on.FirstToken:
        return first_token(state, now)
    if type(event) is on.Finished:
        return become_finished(state, event.reason, now, cancel=event.cancel)
    match event:
        case on.ConnectFailed(key):
            return unreachable(state, key, now)
        case on.NoWorkerFound():
            return no_worker(state, event, now)
        case on.AttemptFailed(failure, answer, closed):
            if is_turned_away(state, failure):
                return turned_away(state, closed=closed)
            return fail(state, failure, answer, now)
        case on.Judged(suspicion):
            return after_failure(state, suspicion, now)
        case on.RequestRejected(error):
            state, effects = leave_unjudged(state)
            return become_done(state, now, effects, error=error)
        case on.WorkerUnhealthy(corrupt, others, answer):
            return worker_unhealthy(state, corrupt, others, answer, now)
        case on.Exposed():
            return exposed(state, event, now)
        case on.TransferBegun():
            return replace(state, transfer=planned_move.Transfer()), ()
        case on.TransferAdvanced(what, said):
            return advance_transfer(state, what, said)
        case on.TransferDeclined(why):
            return replace(state, transfer_refused=why), ()
        case on.Switched(server, move):
            return switched(state, server, move)
        case on.MovedOnPurpose(move, target):
            return move_on_purpose(state, move, target)
        case on.Resumed(planned):
            return resume(state, planned, now)
        case on.Woken():
            return woken(state, now)
        case on.NoneLeft():
            return become_parked(_put_off_ended(state, now), now + state.terms.reroute_s)
        case on.Tick(latency):
            return tick(state, latency, now)
        case on.ClientGone():
            return client_gone(state, now)


# --- to a worker ----------------------------------------------------------------------------------------------------


def become_routing(state: RequestState, planned: Key | None = None, *, free: bool = False) -> Next:
    """Choose a worker for the request: `planned` if possible, otherwise the best one.

    `free` states that the next attempt costs no budget, because nothing has failed.
    """
    tried, missed, declined = state.tried, state.missed, closed_to(state)
    state = replace(state, phase="routing", free=free)
    if not (tried or declined or missed or planned):
        return state, _FIRST_ROUTE
    avoid = tried | declined if declined else tried
    return state, (do.SelectWorker(planned, avoid, state.failed | missed | declined, declined, missed),)


def become_running(state: RequestState, server: Server) -> RequestState:
    """Return the state after an attempt was sent to this worker."""
    last, paid = state.last, not state.free
    attempt = Attempt(server, 1 if last is None else last.number + 1, paid, last)
    return replace(
        state,
        phase="running",
        attempt=attempt,
        first=state.first or attempt,
        last=attempt,
        has_output=False,
        missed=frozenset(),
        spent=state.spent + paid,
        transfer_refused="" if state.disturbed else state.transfer_refused,
    )


def unreachable(state: RequestState, key: Key, now: float) -> Next:
    """Choose a worker again, without the unreachable one. The failed connection costs no budget."""
    state = replace(state, tried=state.tried | {key}, missed=state.missed | {key})
    state, counted = _interrupted(state, now, begun=False)
    state, effects = become_routing(state)
    return state, (counted, *effects)


def no_worker(state: RequestState, event: on.NoWorkerFound, now: float) -> Next:
    """Handle that no worker can serve a request now.

    The request waits if a worker may become available, otherwise it ends with an error.
    """
    move, code = state.move, event.code
    state = replace(state, missed=frozenset())
    if code == HELD:
        if move is not None:
            return become_parked(state, move.since + state.terms.reroute_s)
        return become_parked(state, state.began_at + state.terms.first_token_s, keep_room=True)
    if move is None:
        if code == ALL_BUSY or event.stands_in:
            return replace(state, phase="queued"), (do.QueueAgain(),)
        return become_refused(state, now)
    if code == POISONOUS:
        return become_abandoned(state, now, code, Failure(POISONOUS, move.failure.reason).error)
    patience_s = state.terms.reroute_s - (now - move.since)
    if code == NOT_SERVED and not state.begun and move.failure.reason == NOT_SERVING:
        return become_refused(state, now)  # the adapter was unloaded everywhere
    if code == ALL_CLOSED and not state.begun and not event.stands_in and event.reopens_s > patience_s:
        return become_refused(state, now)
    if move.failure.kind.patient or code != ALL_TRIED or may_return(state) or event.stands_in:
        return become_parked(state, move.since + state.terms.reroute_s)
    return become_abandoned(state, now, code, move.original.error)


# --- tokens ---------------------------------------------------------------------------------------------------------


def first_token(state: RequestState, now: float) -> Next:
    """Record the first token of the current attempt."""
    effects = _LATER_TOKEN if state.begun else _FIRST_TOKEN
    state = replace(state, has_output=True, begun=True)
    if not state.disturbed:
        return state, effects
    state, arrived = arrive(state, now, well=True)
    return state, (*effects, *arrived)


def arrive(state: RequestState, now: float, *, well: bool) -> Next:
    """End the current move (migration).

    `well` states that the new attempt has produced its first token. If false, the new attempt has failed, too.
    """
    effects: Effects = ()
    if state.move is not None and state.attempt is not None:
        effects = (do.ReportMigrated(state.move, well, state.spoilt),)
    state = replace(state, move=None)
    if not well:
        return state, effects
    state, restored = _restored(state, "success", now)
    return state, (*effects, *restored)


# --- failures -------------------------------------------------------------------------------------------------------


def is_turned_away(state: RequestState, failure: Failure) -> bool:
    """Return whether the worker rejected the attempt for lack of capacity, which does not count as a failure.

    An attempt with output or with a transferred KV cache has already started on the worker. Its rejection is a failure.
    """
    carried = state.move is not None and state.move.carried is not None
    return state.attempt is not None and failure.reason == FULL and not state.has_output and not carried


def turned_away(state: RequestState, *, closed: bool) -> Next:
    """Choose a worker again, as if the rejected attempt had not been made.

    If `closed` is true, this worker is not tried again before the answer has its first token.
    """
    attempt = state.attempt
    assert attempt is not None
    declined = state.declined | {attempt.server.key} if closed else state.declined
    state = replace(state, spent=state.spent - attempt.paid, declined=declined)
    state, left = leave(state, failed=False)
    before = attempt.before
    state = replace(state, last=before, first=None if before is None else state.first)
    state, effects = become_routing(state, free=not attempt.paid)
    return state, (do.TurnedAway(), *left, *effects)


def fail(
    state: RequestState,
    failure: Failure,
    answer: AnswerProgress,
    now: float,
    *,
    spoilt: bool = False,
    on_source: bool = True,
) -> Next:
    """Fail the current attempt, and let the driver judge the failure.

    `on_source` states that the attempt's own worker is at fault. If it is false, an earlier worker of the request is at
    fault, and the attempt costs no budget. `spoilt` states that accepted tokens may be wrong. If no attempt is running,
    no worker is judged, and the request counts as harmless.
    """
    replaced, attempt = state.move, state.attempt
    not_carried = ""
    if state.transfer is not None:
        not_carried = "its source failed meanwhile"
    elif failure.reason == "engine_shutdown":
        not_carried = state.transfer_refused
    state, effects = arrive(state, now, well=False)
    failing = Failing(failure, None if replaced is None else replaced.original, not_carried, spoilt, answer)
    if attempt is None:
        state, after = after_failure(replace(state, failing=failing), Suspicion.NONE, now)
        return state, (*effects, *after)
    begun, kind, key = state.has_output, failure.kind, attempt.server.key
    state, counted = _interrupted(state, now, begun=begun)
    spent, tried, failed = state.spent, state.tried, state.failed
    if not on_source:
        spent -= 1  # the attempt's own worker is not at fault, so this attempt costs no budget
    else:
        # The first rejection by each worker costs no budget if no work was done.
        if kind.free and not begun and attempt.paid and key not in tried:
            spent -= 1
        tried, failed = tried | {key}, failed if kind.again else failed | {key}
    state = replace(state, phase="judging", spent=spent, tried=tried, failed=failed, failing=failing)
    return state, (*effects, counted, do.Judge(failure, begun))


def after_failure(state: RequestState, suspicion: Suspicion, now: float) -> Next:
    """Continue on another worker, wait, or end the request, after the driver has judged its failure."""
    failing, source = state.failing, state.attempt or state.first
    assert failing is not None
    failure, replaced, not_carried, spoilt, answer = failing
    state, effects = leave(replace(state, failing=None), failed=True)
    original = failure if replaced is None or replaced.planned else replaced
    if answer.accepted >= state.terms.max_tokens:
        # The answer is complete: only the worker's final frame was missing.
        state, ended = become_finished(state, "length", now)
        return state, (*effects, *ended)
    if suspicion is Suspicion.POISONOUS:
        return become_abandoned(state, now, POISONOUS, Failure(POISONOUS, failure.reason).error, effects)
    if why := refusal(state, answer):
        return become_abandoned(state, now, why, original.error, effects)
    assert source is not None
    accepted = answer.accepted
    if (state.terms.forbidden or answer.stuck) and accepted:
        # The answer cannot be continued, but its client has received none of it: restart from the prompt.
        effects, accepted = (*effects, do.Rewind(0)), 0
    move = Move(failure, original, source.server, now, accepted, refused=not_carried)
    state = replace(state, disturbed=True, move=move, spoilt=state.spoilt or spoilt)
    if suspicion is Suspicion.SUSPECT:
        state, after = become_parked(state, now + state.terms.reroute_s, now + SUSPECT_PAUSE_S)
    elif original is not failure and failure.kind.again:
        state, after = become_parked(state, now + state.terms.reroute_s, now + PAUSE_S)
    else:
        state, after = replace(state, phase="rerouting"), (do.Reroute(),)
    return state, (*effects, *after)


def worker_unhealthy(
    state: RequestState, corrupt: bool, others: Collection[Key], answer: AnswerProgress, now: float
) -> Next:
    """Decide whether a request leaves its worker, which was taken out of service.

    The request leaves a corrupt worker at once. It leaves a worker that is only slow or silent if one of `others` can
    still be tried. Otherwise the request stays as long as tokens arrive.
    """
    if state.attempt is None:
        return state, ()
    elsewhere = not refusal(state, answer) and any(key not in state.tried for key in others)
    if not (corrupt or elsewhere):
        return state, ()
    state, effects = fail(state, Failure("unhealthy", ""), answer, now, spoilt=corrupt)
    return state, (do.CancelStream("elsewhere"), *effects)


def exposed(state: RequestState, event: on.Exposed, now: float) -> Next:
    """Apply the setting `on_corruption` to an answer with tokens that may be wrong.

    With `error`, the request always ends with an error. `continue` and `restart` depend on what the client has:

    - If the client has received a suspect token, `continue` keeps the suspect tokens, and `restart` ends the request
      with an error.
    - If the client has received no suspect token, `continue` and `restart` both generate the suspect tokens again. But
      if the convicted worker stays in service, the suspect tokens are kept.
    """
    setting, first, answer = state.terms.on_corruption, event.first, event.answer
    shown = answer.reached > first
    on_source = state.attempt is not None and state.attempt.server.key == event.key
    if setting == "error" or (setting == "restart" and shown):
        return _end_corrupt(state, now)
    if event.stays or (shown and (on_source or not event.carried)):
        # No move is needed now, because all requests of a worker that leaves the fleet are moved together.
        return replace(state, spoilt=True), (do.ReportExposure("continue"),)
    cancel = do.CancelStream("elsewhere")
    if shown:
        # Keep the accepted tokens, but drop the KV cache that the convicted worker computed.
        failure = Failure("unhealthy", "corrupt KV cache")
        state, effects = fail(replace(state, spoilt=True), failure, answer, now, on_source=False)
        return state, (do.ReportExposure("continue"), cancel, *effects)
    keep = 0 if answer.text else first
    answer = AnswerProgress(keep, min(answer.reached, keep), False)
    state, effects = fail(state, Failure("unhealthy", "corrupt output"), answer, now, on_source=on_source)
    return state, (do.ReportExposure("restart"), cancel, do.Rewind(keep), *effects)


def _end_corrupt(state: RequestState, now: float) -> Next:
    effects: Effects = (do.ReportExposure("error"), do.CancelStream())
    if state.attempt is not None:
        state, counted = _interrupted(state, now, begun=state.has_output)
        effects = (*effects, counted)
    state, left = leave(state, failed=False)
    message = (
        "the worker that generated the answer was found to compute wrong results; send the request again"
    )
    error = ApiError(502, message, code="corrupt_output")
    return become_abandoned(state, now, "corrupt_output", error, (*effects, *left))


def _interrupted(state: RequestState, now: float, *, begun: bool) -> tuple[RequestState, do.CountFailure]:
    """Count a failed attempt, whether or not the request can be retried.

    `begun` states that the attempt has produced tokens.
    """
    kind = "ongoing_request" if begun else "new_request"
    outage = state.outage or TokenGap(now, kind)
    return replace(state, disturbed=True, outage=outage), do.CountFailure(kind)


def _restored(state: RequestState, outcome: do.Outcome, now: float) -> Next:
    """End the outage, if one is open, because a token has arrived or the request has ended."""
    outage = state.outage
    if outage is None:
        return state, ()
    return replace(state, outage=None), (do.CountRestored(outage.kind, outcome, now - outage.since),)


# --- planned moves --------------------------------------------------------------------------------------------------


def move_on_purpose(state: RequestState, move: Move, target: Key | None) -> Next:
    """Move the request off a worker that has not failed, and recompute its KV cache at `target`.

    If `target` is None, preempt the request.
    """
    state, effects = leave_unjudged(replace(state, transfer=None), do.CancelStream("elsewhere"))
    state = replace(state, move=move, disturbed=True)
    if target is None:
        return replace(state, phase="preempted"), effects
    state, route = become_routing(state, target, free=True)
    return state, (*effects, *route)


def advance_transfer(state: RequestState, event: planned_move.Event, said: tuple[int, ...]) -> Next:
    """Advance the KV transfer by an event of `controller.migration.planned_move`.

    `said` contains the tokens that the source has sent since the transfer started.
    """
    if state.transfer is None:
        return state, ()
    transfer, acts = planned_move.step(state.transfer, event, said)
    effects: Effects = tuple(map(do.TransferStep, acts))
    if not transfer.over:
        return replace(state, transfer=transfer), effects
    if transfer.state == "switched":
        return replace(state, transfer=None), effects
    over = do.TransferOver(transfer.state, transfer.why)
    return replace(state, transfer=None), (*effects, over)


def switched(state: RequestState, server: Server, move: Move) -> Next:
    """Continue at the target of the KV transfer, which costs no budget."""
    over = do.TransferOver("switched", "")
    effects = (do.CancelStream("elsewhere"), do.NoteUnjudged(state.has_output), over)
    return become_running(replace(state, move=move, disturbed=True, free=True), server), effects


def leave(state: RequestState, *, failed: bool) -> Next:
    """End the current attempt. If a KV transfer from its worker is under way, end the transfer, too.

    `failed` states that the attempt has failed at its worker.
    """
    if state.attempt is None:
        return state, ()
    effects: Effects = ()
    if state.transfer is not None:
        state, effects = advance_transfer(state, planned_move.SourceLeft(over=not failed), ())
    return replace(state, attempt=None, has_output=False), (*effects, _LEAVE)


def leave_unjudged(state: RequestState, *cancel: do.CancelStream) -> Next:
    """End the current attempt, if there is one, without a fault of its worker.

    `cancel` cancels the attempt's stream.
    """
    if state.attempt is None:
        return state, ()
    effects: Effects = (*cancel, do.NoteUnjudged(state.has_output))
    state, left = leave(state, failed=False)
    return state, (*effects, *left)


# --- waiting --------------------------------------------------------------------------------------------------------


def become_parked(
    state: RequestState, until: float, not_before: float = 0.0, *, keep_room: bool = False
) -> Next:
    """Park the request until a worker is available, or until the time `until`.

    The request is not sent before `not_before`. `keep_room` is set only for a request that was never sent: the
    room that was reserved at its admission is reserved again.
    """
    not_before = max(not_before, state.not_before)
    state = replace(state, phase="parked", disturbed=True, waits_until=until, not_before=not_before)
    return state, (do.Park(keep_room),)


def woken(state: RequestState, now: float) -> Next:
    """Retry a parked request, because a worker may have joined or may have capacity. Do nothing before `not_before`."""
    if state.phase != "parked" or now < state.not_before:
        return state, ()
    # A request that has not failed on any worker is routed on its own, not in the joint placement.
    return replace(state, phase="rerouting"), (do.Reroute(planned=state.move is not None),)


def resume(state: RequestState, planned: Key | None, now: float) -> Next:
    """Choose a worker for a waiting request: the planned worker if possible, otherwise one with room."""
    if state.phase not in ("rerouting", "preempted", "queued"):
        return state, ()
    if state.phase == "preempted":
        state = _put_off_ended(state, now)
    free = state.move is not None and state.move.failure.planned
    return become_routing(state, planned, free=free)


def _put_off_ended(state: RequestState, now: float) -> RequestState:
    move = state.move
    assert move is not None
    put_off_s = state.put_off_s + now - move.since
    return replace(state, put_off_s=put_off_s, move=replace(move, since=now))


def tick(state: RequestState, latency: float, now: float) -> Next:
    """End a request that has been parked for too long, or that has waited too long for its first token."""
    move = state.move
    if state.phase == "parked" and now > state.waits_until:
        if move is not None:
            return become_abandoned(state, now, "no_worker", move.original.error)
        return _give_up(state, now, "no_worker")
    if not state.begun and now - state.began_at > state.terms.first_token_s * latency:
        return _give_up(state, now, "first_token_timeout")
    return state, ()


def _give_up(state: RequestState, now: float, code: str) -> Next:
    cancel: Effects = (do.CancelStream(),) if state.attempt is not None else ()
    state, left = leave(state, failed=False)
    error = ApiError(503, "no token was generated in time", code=code, retry_after_s=1)
    if state.move is not None:
        return become_abandoned(state, now, code, error, (*cancel, *left))
    return become_done(state, now, (*cancel, *left), error=error)


# --- the end --------------------------------------------------------------------------------------------------------


def become_finished(state: RequestState, reason: str, now: float, *, cancel: bool = False) -> Next:
    """End the request with its complete answer.

    If `cancel` is true, cancel the stream at the worker, which would otherwise continue to generate.
    """
    effects: Effects = (do.CancelStream("complete"),) if cancel else ()
    if state.disturbed:
        state, arrived = arrive(state, now, well=True)
        effects = (*effects, *arrived)
    attempt = state.attempt
    if attempt is None:
        return become_done(state, now, effects, finish=reason)
    if state.transfer is not None:
        state, left = advance_transfer(state, planned_move.SourceLeft(over=True), ())
        effects = (*effects, *left)
    alone = attempt is state.first
    state = replace(state, phase="done", attempt=None, has_output=False, waits_until=inf)
    return state, (*effects, do.Complete(reason, alone))


def become_abandoned(
    state: RequestState, now: float, reason: str, error: ApiError, effects: Effects = ()
) -> Next:
    """End a request that cannot be continued. Report it as abandoned, and return the error to its client."""
    return become_done(state, now, (*effects, do.ReportAbandoned(reason)), error=error)


def become_refused(state: RequestState, now: float) -> Next:
    """End a request with the error that states why no worker can serve it."""
    abandoned = state.move is not None
    state, effects = become_done(state, now, ())
    return state, (*effects[:-1], do.Refuse(abandoned))


def client_gone(state: RequestState, now: float) -> Next:
    """Cancel the request because its client has disconnected."""
    state, effects = leave_unjudged(state, do.CancelStream())
    if state.move is not None:
        effects = (*effects, do.ReportAbandoned("cancelled"))
    return become_done(state, now, effects, finish="cancelled")


def become_done(
    state: RequestState,
    now: float,
    effects: Effects,
    *,
    finish: str | None = None,
    error: ApiError | None = None,
) -> Next:
    """End the request, with a finish reason or an error for its client."""
    if state.disturbed:
        outcome: do.Outcome = "cancelled" if finish == "cancelled" else "failure"
        state, restored = _restored(replace(state, move=None), outcome, now)
        effects = (*effects, *restored)
    return replace(state, phase="done", waits_until=inf), (*effects, do.End(finish, error))
