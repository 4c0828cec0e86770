"""The drain: is this worker on its way out, and until when may what it runs go on?

    ─ ─ ▶ idle ── wanted ──▶ draining until `deadline` ──▶ over (empty, deadline, left, resumed)

Wanted by an operator (DrainRequested), by the worker itself (ShutdownBegan), or by health, which has given it up
(HealthChanged to DRAINING). An operator's worker that is empty stays so, drained, until it is resumed or leaves; to wish
for its drain again changes nothing. The controller waits a margin longer than it tells the worker, so that a worker that ends
its last streams exactly at the deadline still reports empty in time.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from math import isnan
from typing import Literal

from controller.deciders.validation import STRICT, at_least
from events.decisions import DrainEnded, DrainStarted, HealthChanged, HealthStatus
from events.fact import Decision, Fact
from events.frozen import replace
from events.observations import DrainFinished, DrainRequested, ResumeRequested, ShutdownBegan, WorkerLeft

GONE = (
    "silent"  # the reason of a HealthChanged for a worker that is not there any more: its drain ends at once
)
DEADLINE_S_MAX = 86_400.0  # a longer wish is cut to a day: a deadline must come


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPolicy:
    """How long a drain may take.

    The default is the orchestrator's usual 60 s grace less the time to stop and a margin (N24).
    """

    wait: timedelta = timedelta(seconds=45)  # that a worker has to finish, where nobody says
    margin: timedelta = timedelta(seconds=5)  # that the controller waits beyond that
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        at_least(0, wait=self.wait, margin=self.margin)


@dataclass(frozen=True, slots=True)
class Drain:
    """One worker's drain."""

    worker: str
    instance: str
    wanted: str = ""  # why, until the drain has started
    wanted_s: float | None = None  # the deadline that was asked for
    deadline: datetime | None = None  # set while the drain runs: what the worker was told
    reason: str = ""
    empty: bool = False
    done: bool = False  # it drained empty, and nobody has resumed it since
    gone: bool = False  # health has given it up as silent
    left: bool = False
    resumed: bool = False
    cause: str = ""

    @property
    def active(self) -> bool:
        """Whether the worker is draining now."""
        return self.deadline is not None


def evolve(state: Drain, fact: Fact, cause: str = "") -> Drain:
    """Absorb one fact about this worker and instance."""
    match fact:
        case DrainRequested():
            return _want(state, "operator", fact.deadline_s, cause)
        case ShutdownBegan():
            return _want(state, f"shutdown: {fact.mode}", fact.grace_s, cause)
        case HealthChanged(after=HealthStatus.DRAINING):
            return _given_up(state, fact.reason, cause)
        case HealthChanged(after=HealthStatus.DEAD):
            return replace(state, wanted="", left=True, cause=cause)
        case ResumeRequested():
            return replace(state, wanted="", resumed=state.active, done=False, cause=cause)
        case DrainFinished():
            return replace(state, empty=True, cause=cause) if state.active or state.wanted else state
        case WorkerLeft():
            return replace(state, wanted="", left=True, cause=cause)
        case DrainStarted():
            return _started(state, fact)
        case DrainEnded():
            return _ended(state, fact)
        case _:
            return state


def _started(state: Drain, fact: DrainStarted) -> Drain:
    """Begin the drain that was wanted. A worker that is empty or gone already stays so: that ends it at once."""
    return replace(
        state,
        wanted="",
        wanted_s=None,
        deadline=fact.deadline,
        reason=fact.reason,
        done=False,
        resumed=False,
        cause=f"decision:{fact.number}",
    )


def _ended(state: Drain, fact: DrainEnded) -> Drain:
    """Forget the drain but for whether it is done. What is wanted by now is the next one."""
    return replace(
        state,
        deadline=None,
        reason="",
        empty=False,
        done=fact.outcome == "empty",
        gone=False,
        resumed=False,
        cause=f"decision:{fact.number}",
    )


def _want(state: Drain, reason: str, deadline_s: float | None, cause: str) -> Drain:
    if state.left or state.done or (state.active and not state.resumed):
        return state
    return replace(state, wanted=reason, wanted_s=deadline_s, empty=False, cause=cause)


def _given_up(state: Drain, reason: str, cause: str) -> Drain:
    """Follow health into a drain, or in one that goes on already, learn that nobody is there any more."""
    state = replace(state, gone=reason == GONE)
    if state.active or state.wanted:
        return state
    return replace(_want(replace(state, done=False), reason, None, cause), empty=state.done)


def decide(policy: DrainPolicy, state: Drain, now: datetime) -> tuple[Decision, ...]:
    """Say what is due now: at most one decision."""
    if state.deadline is None:
        if not state.wanted or state.left:
            return ()
        started = DrainStarted(
            worker=state.worker,
            instance=state.instance,
            deadline=now + _wait(policy, state.wanted_s),
            reason=state.wanted,
            decided_at=now,
            cause=state.cause,
        )
        return (started,)
    outcome = _outcome(policy, state, state.deadline, now)
    if outcome is None:
        return ()
    ended = DrainEnded(
        worker=state.worker, instance=state.instance, outcome=outcome, decided_at=now, cause=state.cause
    )
    return (ended,)


def due_at(policy: DrainPolicy, state: Drain) -> datetime | None:
    """Return when time alone makes something due."""
    return None if state.deadline is None else state.deadline + policy.margin


def _wait(policy: DrainPolicy, wanted_s: float | None) -> timedelta:
    if wanted_s is None or isnan(wanted_s):
        return policy.wait
    return timedelta(seconds=min(max(wanted_s, 0.0), DEADLINE_S_MAX))


def _outcome(
    policy: DrainPolicy, state: Drain, deadline: datetime, now: datetime
) -> Literal["empty", "deadline", "left", "resumed"] | None:
    if state.left or state.gone:
        return "left"
    if state.resumed:
        return "resumed"
    if state.empty:
        return "empty"
    return "deadline" if now >= deadline + policy.margin else None
