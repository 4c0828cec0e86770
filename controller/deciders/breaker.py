"""The circuit breaker of one worker: stops requests to a failing worker until a trial passes.

    closed ── failures_max in a row, or UNHEALTHY ──▶ open ── retry_at ──▶ half-open
      ▲                                                ▲                    │    │
      │                                                └─ trial failed, or ─┘    │
      │                                                   none by the deadline   │
      └────────────────────────── trial passed ──────────────────────────────────┘

In the diagram, `failures_max` is a setting, UNHEALTHY is a decision about the worker's health, and `retry_at` is the end
of the wait. In the fleet's breaker the trial is the first canary that was sent after the decision to half-open the breaker.
Each frontend also runs this state machine locally (`trial_by="request"`). In a frontend the trial is one real request.

An outcome counts only if its canary or request was sent after the breaker's last transition. This order is determined by
decision numbers, not by clocks. Outcomes that arrive while the breaker is open are ignored, so that late failures cannot
keep the breaker open.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from controller.deciders.validation import STRICT, at_least
from events import decisions as decided
from events import observations as seen
from events.fact import Decision, Fact
from events.frozen import replace

TRIAL_FAILED = "trial_failed"  # prefix of the reason of a BreakerOpened after a failed trial
NO_RESULT = "no result"  # reason of a trial that timed out
UNANSWERED = ("silent", "no_response", "timeout", NO_RESULT)  # failure reasons that mean no answer arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """Thresholds and waiting times of the circuit breaker.

    `backoff` multiplies the wait after each consecutive failed trial; 1 keeps the wait fixed.
    """

    failures_max: int = 3  # consecutive canary or request failures that open the breaker
    wait_min: timedelta = timedelta(seconds=60)  # from opening to the first trial
    wait_max: timedelta = timedelta(minutes=15)  # upper limit of the wait
    backoff: float = 2.0  # factor by which each consecutive failed trial lengthens the wait; 1: fixed wait
    trial_timeout: timedelta = timedelta(seconds=30)  # a trial without an outcome fails after this
    silence_ends_wait: bool = True  # retry a worker that gave no wrong answer as soon as it answers again
    soft_timeouts: bool = True  # a canary timeout does not count while the worker's engine makes progress
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        at_least(1, failures_max=self.failures_max, backoff=self.backoff)
        at_least(0, wait_min=self.wait_min, wait_max=self.wait_max, trial_timeout=self.trial_timeout)


@dataclass(frozen=True, slots=True)
class Breaker:
    """The state of one worker's circuit breaker."""

    worker: str
    instance: str
    position: decided.BreakerPosition = "closed"
    request_failures: int = 0  # in a row, as counted by the frontend that reported last
    canary_failures: int = 0  # in a row
    unhealthy: str = ""  # why health became UNHEALTHY, until the breaker has reacted
    trial: Literal["", "passed", "failed"] = ""  # its outcome, until the breaker has reacted
    trials_failed: int = 0  # in a row
    moved_by: int = 0  # number of the decision that last moved it
    retry_at: datetime | None = None
    retry_now: bool = False  # the evidence that opened it was withdrawn: the trial is due at once
    deadline: datetime | None = None  # of the trial
    resting: bool = False  # the worker is draining or dead: no trials
    trial_by: Literal["canary", "request"] = "canary"
    admitted: bool = False  # the one trial request is in flight (frontends only)
    why: str = ""  # the last failure's reason
    cause: str = ""  # id of the last fact that changed this state
    timeouts: int = 0  # consecutive canary timeouts during which the worker's engine made progress
    # "again": it answered since the breaker opened; "wrong": a wrong answer or error since it last closed.
    answers: Literal["", "again", "wrong"] = ""
    closed_at: datetime | None = None  # when it last closed

    def about(self, now: datetime) -> decided.AboutWorker:
        """Return the fields that all decisions about this worker have in common. `now` is the decision's time."""
        return {"worker": self.worker, "instance": self.instance, "decided_at": now, "cause": self.cause}


def evolve(state: Breaker, fact: Fact, cause: str = "") -> Breaker:
    """Return the breaker's state after one fact about its worker instance."""
    match fact:
        case seen.CanaryFailed(reason="latency_spike") | seen.CanaryPassed() | seen.CanarySlow():
            return _answered(_succeeded(state, "canary", fact.sent_under, cause), fact.sent_under, cause)
        case seen.CanaryFailed():
            return _canary_failed(state, fact, cause)
        case seen.WorkerHeard():
            return _answered(state, state.moved_by, cause)
        case seen.RequestsServed():
            return _succeeded(state, "request", fact.routed_under, cause)
        case seen.RequestFailed():
            return _failed(state, "request", fact.routed_under, fact.failures_in_a_row, fact.reason, cause)
        case seen.RequestPoisonous():
            return _withdraw_failures(state, fact, cause)
        case decided.HealthChanged():
            return _health_changed(state, fact, cause)
        case seen.WorkerLeft():
            return replace(state, resting=True)
        case decided.BreakerOpened() | decided.BreakerHalfOpened() | decided.BreakerClosed():
            return _moved(state, fact)
        case _:
            return state


def try_now(state: Breaker, cause: str) -> Breaker:
    """Make the next trial due at once, because the evidence that opened the breaker was withdrawn.

    A closed breaker does not change. If the breaker is half-open and its running trial fails, the next trial is due at once.
    """
    return state if state.position == "closed" else replace(state, retry_now=True, cause=cause)


def _succeeded(state: Breaker, by: str, sent_under: int, cause: str) -> Breaker:
    if sent_under < state.moved_by or state.position == "open":
        return state
    if state.position == "half_open":
        return _tried(state, by, "passed", "", cause)
    if by == "canary":
        return state if not state.canary_failures else replace(state, canary_failures=0, timeouts=0)
    return state if not state.request_failures else replace(state, request_failures=0)


def _failed(state: Breaker, by: str, sent_under: int, in_a_row: int, why: str, cause: str) -> Breaker:
    if sent_under < state.moved_by or state.position == "open":
        return state
    if state.position == "half_open":
        return _tried(state, by, "failed", why, cause)
    if by == "canary":
        return replace(state, canary_failures=in_a_row, why=why, cause=cause)
    return replace(state, request_failures=in_a_row, why=why, cause=cause)


def _canary_failed(state: Breaker, fact: seen.CanaryFailed, cause: str) -> Breaker:
    """Count a failed canary.

    After a wrong answer or an error, `state.answers` is "wrong" until the breaker closes.
    """
    failed = _failed(state, "canary", fact.sent_under, state.canary_failures + 1, fact.reason, cause)
    if failed.canary_failures > state.canary_failures and fact.engine_went_on and fact.reason == "timeout":
        failed = replace(failed, timeouts=state.timeouts + 1)
    return failed if fact.reason in UNANSWERED else replace(failed, answers="wrong")


def _answered(state: Breaker, sent_under: int, cause: str) -> Breaker:
    """Record that the worker of an open breaker answers again.

    An answer is ignored if its probe was sent before the breaker's last transition.
    """
    if state.position != "open" or state.answers or sent_under < state.moved_by:
        return state
    return replace(state, answers="again", cause=cause)


def _withdraw_failures(state: Breaker, fact: seen.RequestPoisonous, cause: str) -> Breaker:
    """Subtract the failures that a poisonous request caused, because such a request fails on every worker.

    A breaker that these failures have already opened stays open until its trial passes.
    """
    if fact.routed_under < state.moved_by or fact.failures_in_a_row >= state.request_failures:
        return state
    return replace(state, request_failures=fact.failures_in_a_row, cause=cause)


def _tried(state: Breaker, by: str, outcome: Literal["passed", "failed"], why: str, cause: str) -> Breaker:
    """Record the first outcome of the trial. Later outcomes are ignored.

    `by` states what was sent: a canary or a request. Only outcomes of the kind `state.trial_by` are recorded.
    """
    if by != state.trial_by or state.trial:
        return state
    return replace(state, trial=outcome, why=why, cause=cause)


def _health_changed(state: Breaker, fact: decided.HealthChanged, cause: str) -> Breaker:
    resting = fact.after in (decided.HealthStatus.DRAINING, decided.HealthStatus.DEAD)
    if fact.after is decided.HealthStatus.UNHEALTHY and state.position != "open":
        return replace(state, resting=False, unhealthy=fact.reason, cause=cause)
    return state if state.resting == resting else replace(state, resting=resting)


def _moved(
    state: Breaker, fact: decided.BreakerOpened | decided.BreakerHalfOpened | decided.BreakerClosed
) -> Breaker:
    """Apply a transition of the breaker. The evidence from before the transition is reset.

    If the breaker closes, the count of consecutive failed trials and the record of a wrong answer are reset too.
    """
    moved = replace(
        state,
        request_failures=0,
        canary_failures=0,
        timeouts=0,
        answers="" if state.answers == "again" else state.answers,
        unhealthy="",
        trial="",
        retry_at=None,
        retry_now=False,
        deadline=None,
        admitted=False,
        why="",
        moved_by=fact.number,
        cause=f"decision:{fact.number}",
    )
    match fact:
        case decided.BreakerOpened():
            failed = state.trials_failed + (state.position == "half_open")
            return replace(
                moved,
                position="open",
                retry_at=fact.retry_at,
                retry_now=state.retry_now,
                trials_failed=failed,
                why=fact.reason,
            )
        case decided.BreakerHalfOpened():
            return replace(moved, position="half_open", deadline=fact.deadline)
        case _:
            return replace(moved, position="closed", trials_failed=0, answers="", closed_at=fact.decided_at)


def decide(policy: BreakerPolicy, state: Breaker, now: datetime) -> tuple[Decision, ...]:
    """Return the due transition as a tuple of one decision; an empty tuple if none is due."""
    if state.resting:
        return ()
    if state.position == "closed":
        reason = _trip(policy, state)
        return (_open(policy, state, now, reason, trials_failed=0),) if reason else ()
    if state.position == "half_open":
        return _end_trial(policy, state, now)
    due = due_at(policy, state)
    if not state.retry_now and (due is None or now < due):
        return ()
    return (decided.BreakerHalfOpened(**state.about(now), deadline=now + policy.trial_timeout),)


def due_at(policy: BreakerPolicy, state: Breaker) -> datetime | None:
    """Return the time at which a transition becomes due if no further fact arrives; None if none does.

    With `silence_ends_wait`, a breaker that opened only for missing answers need not wait until `retry_at`. It half-opens
    once its worker answers again, with two limits. After a failed trial, at least half of `wait_min` must have passed since
    the opening. If the breaker was closed before, at least `wait_min` must have passed since the last closing. Without these
    limits, a flapping connection would take the worker in and out of service every few seconds.
    """
    if state.position != "open" or state.retry_at is None:
        return state.deadline if state.position != "open" else None
    if not (policy.silence_ends_wait and state.answers == "again" and _was_silent(state)):
        return state.retry_at
    opened_at = state.retry_at - wait_after(policy, state.trials_failed)
    tried_at = opened_at + (policy.wait_min / 2 if state.trials_failed else timedelta())
    calm_at = tried_at if state.closed_at is None else state.closed_at + policy.wait_min
    return min(state.retry_at, max(tried_at, calm_at))


def _was_silent(state: Breaker) -> bool:
    """Return whether the breaker opened only because answers were missing."""
    opened_by, _, reason = state.why.partition(": ")
    return reason in UNANSWERED and opened_by in ("unhealthy", "canaries", TRIAL_FAILED)


def _trip(policy: BreakerPolicy, state: Breaker) -> str:
    if state.unhealthy:
        return f"unhealthy: {state.unhealthy}"
    if state.canary_failures - (state.timeouts if policy.soft_timeouts else 0) >= policy.failures_max:
        return f"canaries: {state.why}"
    if state.request_failures >= policy.failures_max:
        return f"requests: {state.why}"
    return ""


def _end_trial(policy: BreakerPolicy, state: Breaker, now: datetime) -> tuple[Decision, ...]:
    if not state.unhealthy and state.trial == "passed":
        return (decided.BreakerClosed(**state.about(now)),)
    if state.unhealthy:
        reason = f"unhealthy: {state.unhealthy}"
    elif state.trial == "failed":
        reason = f"{TRIAL_FAILED}: {state.why}"
    elif state.deadline is not None and now >= state.deadline:
        reason = f"{TRIAL_FAILED}: {NO_RESULT}"
    else:
        return ()
    return (_open(policy, state, now, reason, state.trials_failed + 1),)


def _open(
    policy: BreakerPolicy, state: Breaker, now: datetime, reason: str, trials_failed: int
) -> decided.BreakerOpened:
    wait = wait_after(policy, trials_failed)
    about, wait_s = state.about(now), wait.total_seconds()
    return decided.BreakerOpened(**about, retry_at=now + wait, wait_s=wait_s, reason=reason)


def wait_after(policy: BreakerPolicy, trials_failed: int) -> timedelta:
    """Return the time from an opening to the next trial, after `trials_failed` consecutive failed trials."""
    wait, longest = policy.wait_min.total_seconds(), policy.wait_max.total_seconds()
    for _ in range(trials_failed):
        if wait >= longest or policy.backoff <= 1:
            break
        wait *= policy.backoff
    return timedelta(seconds=max(min(wait, longest), policy.wait_min.total_seconds()))


def admit(state: Breaker) -> Breaker | None:
    """Return the state after a frontend's local breaker admits one request; None if the breaker rejects the request.

    A half-open breaker admits exactly one request, which is its trial. If the outcome of that request is never reported, the
    trial fails at its deadline. A lost request therefore cannot block the breaker for ever.
    """
    if state.position == "closed":
        return state
    if state.position == "half_open" and not state.admitted:
        return replace(state, admitted=True)
    return None
