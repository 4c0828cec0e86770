"""Planted faults of the request machine, which the simulator must find.

Each wraps the production `step`: it changes the state or event that goes in, or the effects that come out.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace
from planted import Planted

from controller.frontend.request import effects as do
from controller.frontend.request import events as on
from controller.frontend.request.effects import Effects
from controller.frontend.request.events import Event
from controller.frontend.request.failures import FULL, Failure
from controller.frontend.request.state import RequestState
from controller.frontend.request.step import Next, step
from controller.simulator.world.seams import Seams


def _before(change: Callable[[RequestState, Any], tuple[RequestState, Event] | None]) -> Seams:
    """Return a machine that receives a changed state and event; None hides the event."""

    def wrong(state: RequestState, event: Event, now: float) -> Next:
        changed = change(state, event)
        return (state, ()) if changed is None else step(*changed, now)

    return Seams(step=wrong)


def _after(change: Callable[[RequestState, Any, Effects], Effects]) -> Seams:
    """Return a machine with changed effects. `change` receives the state after the event."""

    def wrong(state: RequestState, event: Event, now: float) -> Next:
        after, effects = step(state, event, now)
        return after, change(after, event, effects)

    return Seams(step=wrong)


def _without(kind: type) -> Seams:
    """Return a machine without one kind of effect."""
    return _after(lambda state, event, effects: tuple(one for one in effects if not isinstance(one, kind)))


def _ignoring(kind: type) -> Seams:
    """Return a machine that ignores one kind of event."""
    return _before(lambda state, event: None if isinstance(event, kind) else (state, event))


def _refused(reason: str) -> Seams:
    """Return a machine that treats a rejection by a full worker as another failure."""

    def change(state: RequestState, event: Any) -> tuple[RequestState, Event]:
        if isinstance(event, on.AttemptFailed) and event.failure.reason == FULL:
            event = replace(event, failure=Failure(reason, ""))
        return state, event

    return _before(change)


def _last_failure(state: RequestState, event: Any) -> tuple[RequestState, Event]:
    """Forget the first failure."""
    move = state.move
    return (state if move is None else replace(state, move=replace(move, original=move.failure))), event


def _forgets_move(state: RequestState, event: Any) -> tuple[RequestState, Event]:
    """Treat each failure as the first one."""
    failed = isinstance(event, on.AttemptFailed) and state.move is not None
    return (replace(state, move=None) if failed else state), event


def _always_continues(state: RequestState, event: Any) -> tuple[RequestState, Event]:
    if isinstance(event, on.Exposed):
        state = replace(state, terms=replace(state.terms, on_corruption="continue"))
    return state, event


def _keeps_all(state: RequestState, event: Any) -> tuple[RequestState, Event]:
    """Treat all accepted tokens as received by the client."""
    if isinstance(event, on.Exposed):
        event = replace(event, answer=event.answer._replace(reached=event.answer.accepted))
    return state, event


def _costs_budget(state: RequestState, event: Any) -> tuple[RequestState, Event]:
    return (replace(state, free=False) if isinstance(event, on.Sent) else state), event


def _always_free(state: RequestState, event: Any) -> tuple[RequestState, Event]:
    return (replace(state, free=True) if isinstance(event, on.Sent) else state), event


def _forgets_workers(state: RequestState, event: Any) -> tuple[RequestState, Event]:
    if isinstance(event, on.Resumed):
        state = replace(state, tried=frozenset(), failed=frozenset())
    return state, event


def _begins_anew(state: RequestState, event: Any, effects: Effects) -> Effects:
    """Drop all tokens with each move, whatever the client has received."""
    return (*effects, do.Rewind(0)) if isinstance(event, on.MovedOnPurpose) else effects


def _ends_twice(state: RequestState, event: Any, effects: Effects) -> Effects:
    return (*effects, do.End("cancelled")) if isinstance(event, on.ClientGone) and effects else effects


def _switches_early(state: RequestState, event: Event, now: float) -> Next:
    """Read the target before the source's last tokens have arrived."""
    after, effects = step(state, event, now)
    transfer = after.transfer
    if isinstance(event, on.TransferAdvanced) and transfer is not None and transfer.state == "committed":
        return after, (*effects, do.TransferStep("switch"))
    return after, effects


def _stays_judging(state: RequestState, event: Event, now: float) -> Next:
    """Keep the failure after it was judged."""
    after, effects = step(state, event, now)
    return (replace(after, failing=state.failing) if isinstance(event, on.Judged) else after), effects


REFUSALS = {
    "refusal_fails": Planted(
        "a rejection by a full worker counts against the worker", _refused("engine_error"), ("refusal_is_no_fault",)
    ),
    "refusal_moves": Planted(
        "a rejection by a full worker is reported as a migration", _refused("unhealthy"), ("refusal_is_no_failure",)
    ),
}  # fmt: skip

PLANTED_REQUESTS = {
    "no_cancel": Planted(
        "the stream of an abandoned attempt is still read",
        _without(do.CancelStream),
        ("request_reads", "request_whole"),
    ),
    "no_leave": Planted(
        "an ended request keeps its place at the worker", _without(do.LeaveWorker), ("request_whole",)
    ),
    "ends_twice": Planted("a request ends twice", _after(_ends_twice), ("request_ends",)),
    "client_unheard": Planted("a disconnected client is not noticed", _ignoring(on.ClientGone), ("request_ends",)),
    "begins_anew": Planted(
        "a move drops tokens that the client has received", _after(_begins_anew), ("request_tokens",)
    ),
    "switches_early": Planted(
        "a transfer does not wait for the source's last tokens", Seams(step=_switches_early), ("request_tokens",)
    ),
    "always_free": Planted("no attempt costs budget", _before(_always_free), ("request_budget",)),
    "costs_budget": Planted("a move on purpose costs budget", _before(_costs_budget), ("request_budget",)),
    "forgets_workers": Planted(
        "a request may return to the worker that failed it", _before(_forgets_workers), ("request_excluded",)
    ),
    "sleeps_on": Planted(
        "a parked request is not woken", _ignoring(on.Woken), ("request_resumes", "request_waits")
    ),
    "waits_on": Planted("a request waits for ever", _ignoring(on.Tick), ("request_waits",)),
    "last_failure": Planted(
        "the client receives the last failure", _before(_last_failure), ("request_first_failure",)
    ),
    "forgets_move": Planted(
        "a second failure before a token forgets the first",
        _before(_forgets_move),
        ("request_first_failure", "request_reports"),
    ),
    "outage_without_end": Planted(
        "an outage continues after the next token", _without(do.CountRestored), ("request_outages",)
    ),
    "unreported": Planted("migrations are not reported", _without(do.ReportMigrated), ("request_reports",)),
    "always_continues": Planted(
        "the corruption policy is not applied", _before(_always_continues), ("request_policy",)
    ),
    "keeps_all": Planted(
        "tokens that may be wrong are kept although the client has none of them",
        _before(_keeps_all),
        ("request_policy",),
    ),
    "stays_judging": Planted("a failure is judged for ever", Seams(step=_stays_judging), ("request_state",)),
}  # fmt: skip
