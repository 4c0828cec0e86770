"""The state machine of one worker's drain, which ends when its streams have ended or at a deadline.

    ─ ─ ▶ idle ── wanted ──▶ draining until `deadline` ──▶ over (empty, deadline, left, resumed)

In the diagram, `wanted` is a recorded drain request, and the words after "over" are the possible outcomes. A drain is
requested by an operator (DrainRequested), by the worker itself (ShutdownBegan), or by a decision that gives the worker up
(HealthChanged to DRAINING).

A worker that has drained empty stays drained until it is resumed or leaves, and ignores further drain requests of an operator.
After the worker's deadline, the controller waits for a further `margin`. So a worker that ends its last streams exactly at the
deadline can still report that it is empty.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from math import isnan
from typing import Literal

from controller.deciders.validation import STRICT, at_least
from events.decisions import AboutWorker, DrainEnded, DrainStarted, HealthChanged, HealthStatus
from events.fact import Decision, Fact
from events.frozen import replace
from events.observations import DrainFinished, DrainRequested, ResumeRequested, ShutdownBegan, WorkerLeft

GONE = "silent"  # the reason of a HealthChanged for a worker that has disappeared: its drain ends at once
DEADLINE_S_MAX = 86_400.0  # a longer requested deadline is cut to one day


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPolicy:
    """The time limits of a drain.

    The default `wait` is the usual grace period of an orchestrator (60 s), minus the margin and the time to stop the process.
    """

    wait: timedelta = timedelta(seconds=45)  # time a worker has to finish when the request names no deadline
    margin: timedelta = timedelta(seconds=5)  # time the controller waits beyond that
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        at_least(0, wait=self.wait, margin=self.margin)


@dataclass(frozen=True, slots=True)
class Drain:
    """The drain state of one worker instance."""

    worker: str
    instance: str
    wanted: str = ""  # reason of a requested drain, until it starts
    wanted_s: float | None = None  # requested deadline, in seconds
    deadline: datetime | None = None  # set while the drain runs: the deadline given to the worker
    reason: str = ""
    empty: bool = False
    done: bool = False  # it drained empty and has not been resumed since
    gone: bool = False  # health gave it up as silent
    left: bool = False
    resumed: bool = False
    cause: str = ""

    def about(self, now: datetime) -> AboutWorker:
        """Return the fields that all decisions about this worker have in common. `now` is the decision's time."""
        return {"worker": self.worker, "instance": self.instance, "decided_at": now, "cause": self.cause}

    @property
    def active(self) -> bool:
        """Whether the worker is draining now."""
        return self.deadline is not None


def evolve(state: Drain, fact: Fact, cause: str = "") -> Drain:
    """Return the drain state after one fact about the worker instance."""
    match fact:
        case DrainRequested():
            return _request(state, "operator", fact.deadline_s, cause)
        case ShutdownBegan():
            return _request(state, f"shutdown: {fact.mode}", fact.grace_s, cause)
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
    """Record the start of the requested drain.

    `empty` and `gone` are kept, because the drain of a worker without streams, or of a lost worker, ends at once.
    """
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
    """Reset the state at the end of a drain, and record in `done` whether the worker drained empty.

    A drain request that was recorded during the drain is kept and starts another drain.
    """
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


def _request(state: Drain, reason: str, deadline_s: float | None, cause: str) -> Drain:
    if state.left or state.done or (state.active and not state.resumed):
        return state
    return replace(state, wanted=reason, wanted_s=deadline_s, empty=False, cause=cause)


def _given_up(state: Drain, reason: str, cause: str) -> Drain:
    """Request a drain because a health decision gave the worker up.

    If a drain is already requested or running, only record whether the worker has disappeared (`gone`).
    """
    state = replace(state, gone=reason == GONE)
    if state.active or state.wanted:
        return state
    return replace(_request(replace(state, done=False), reason, None, cause), empty=state.done)


def decide(policy: DrainPolicy, state: Drain, now: datetime) -> tuple[Decision, ...]:
    """Return the due start or end of the drain as a tuple of one decision; an empty tuple if neither is due."""
    if state.deadline is None:
        if not state.wanted or state.left:
            return ()
        deadline = now + _wait(policy, state.wanted_s)
        return (DrainStarted(**state.about(now), deadline=deadline, reason=state.wanted),)
    outcome = _outcome(policy, state, state.deadline, now)
    return (DrainEnded(**state.about(now), outcome=outcome),) if outcome is not None else ()


def due_at(policy: DrainPolicy, state: Drain) -> datetime | None:
    """Return the time at which the drain ends if no further fact arrives; None if no drain is running."""
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
