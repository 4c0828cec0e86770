"""The policy and the transitions of a worker's health: the decisions of the machine in `health`.

No function here receives a fact. The due transition depends only on the state and the time, so the result is the same when
it is computed late, twice, or after a crash.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TypeAlias

from controller.deciders.health_state import (
    DEAD,
    DRAINING,
    ENGINE,
    HEALTHY,
    INTRUSION,
    LIMITED,
    NEW_LINEAGE,
    RELAPSE,
    SILENT,
    SUSPICIOUS,
    TRIALS_FAILED,
    UNANSWERED,
    UNHEALTHY,
    Health,
)
from controller.deciders.validation import STRICT, at_least, demand, share
from events.decisions import HealthChanged, HealthStatus
from events.fact import Decision

Move: TypeAlias = tuple[HealthStatus, float, str]  # target status, weight before device limits, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """When a worker is taken out of service on doubt, and how it returns."""

    failures_max: int = 3  # consecutive failed canaries that make a worker UNHEALTHY
    slows_max: int = 3  # consecutive slow reports that make a worker SUSPICIOUS
    quicks_min: int = 3  # consecutive canaries at normal speed that end a suspicion of slowness
    suspicious_weight: float = 0.5  # weight of a SUSPICIOUS worker
    ramp: tuple[float, ...] = (0.25, 0.5, 1.0)  # weights of a returning worker, one step per good canary
    trials_max: int = 5  # consecutive failed breaker trials after which a worker is given up
    dead_after: timedelta = timedelta(seconds=30)  # silence after which an UNHEALTHY worker is given up
    good_to_acquit: int = 8  # consecutive good canaries that acquit: two rounds of the default four
    eject_intruders: bool = True  # take a worker out of service that tried to harm other workers
    soft_timeouts: bool = True  # count a canary timeout as slow, not failed, while the engine makes progress
    silence_returns_whole: bool = True  # restore the full weight of a worker that gave no wrong answer
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        at_least(1, failures_max=self.failures_max, slows_max=self.slows_max, trials_max=self.trials_max)
        at_least(1, quicks_min=self.quicks_min, good_to_acquit=self.good_to_acquit)
        at_least(0, dead_after=self.dead_after)
        share(suspicious_weight=self.suspicious_weight)
        rises = all(low < high for low, high in pairwise((0.0, *self.ramp)))
        demand(
            rises and bool(self.ramp) and max(self.ramp) <= 1,
            f"ramp is {self.ramp}: it must rise from above 0 to 1",
        )


def decide(
    policy: HealthPolicy, state: Health, now: datetime, *, held: Callable[[], bool] = lambda: False
) -> tuple[Decision, ...]:
    """Return the move that is due now: at most one. `held`: whether the worker's lineage is new and has no agreed golden."""
    move = _due(policy, state, now) or _limited(state)
    if move is not None and move[0] is HEALTHY and state.joining and state.status is SUSPICIOUS and held():
        move = None if state.held else (SUSPICIOUS, 0.0, NEW_LINEAGE)
    if move is None:
        return ()
    after, weight, reason = move
    changed = HealthChanged(
        worker=state.worker,
        instance=state.instance,
        before=state.status,
        after=after,
        reason=reason,
        weight=min(weight, state.limit),
        unlimited=weight if weight > state.limit else None,
        decided_at=now,
        cause=state.cause,
    )
    return (changed,)


def due_at(policy: HealthPolicy, state: Health) -> datetime | None:
    """Return when a move becomes due by time alone."""
    since = state.charges.silent_since
    return None if since is None else since + policy.dead_after


def _limited(state: Health) -> Move | None:
    """Return the move that a device's limit requires when nothing else is due."""
    if state.status is not HEALTHY and state.status is not SUSPICIOUS:
        return None
    left = min(state.unlimited, state.limit) if state.limits else state.unlimited
    if state.weight == left:
        return None
    return state.status, state.unlimited, LIMITED


def _due(policy: HealthPolicy, state: Health, now: datetime) -> Move | None:
    """Return the move that is due. A drain comes before an accusation, so that a convicted worker ends up UNHEALTHY."""
    if state.status is DEAD:
        return None
    if state.exit.left:
        return DEAD, 0.0, state.exit.left
    if state.exit.over and (state.exit.given_up or state.exit.over in ("deadline", "left")):
        return DEAD, 0.0, f"drained: {state.exit.over}"
    if state.exit.leaving:
        return DRAINING, 0.0, state.exit.leaving
    if state.charges.accused:
        return UNHEALTHY, 0.0, state.charges.accused
    if state.intrusion and policy.eject_intruders and state.status in (HEALTHY, SUSPICIOUS):
        return UNHEALTHY, 0.0, f"{INTRUSION}: {state.intrusion}"
    if state.status is HEALTHY:
        return _from_healthy(policy, state)
    if state.status is SUSPICIOUS:
        return _from_suspicious(policy, state)
    if state.status is UNHEALTHY:
        return _from_unhealthy(policy, state, now)
    back = state.exit.resumed and state.canaries.goods >= 1 and not _blocked(policy, state)
    return (HEALTHY, policy.ramp[0], "resumed") if back else None


def _from_healthy(policy: HealthPolicy, state: Health) -> Move | None:
    if _failures(policy, state):
        if state.ramp < 1:
            return UNHEALTHY, 0.0, f"{RELAPSE}: {state.canaries.failure}"
        return SUSPICIOUS, policy.suspicious_weight, state.canaries.failure
    if _slows(policy, state) >= policy.slows_max:
        return SUSPICIOUS, min(state.unlimited, policy.suspicious_weight), "slow"
    if state.disputed:
        return SUSPICIOUS, min(state.unlimited, policy.suspicious_weight), "golden_disputed"
    if state.ramp < 1 and state.canaries.goods:
        return HEALTHY, _step(policy, state), "ramp"
    return None


def _failures(policy: HealthPolicy, state: Health) -> int:
    """Return the consecutive failed canaries. A timeout while the worker's engine makes progress is no failure."""
    return state.canaries.failures - (state.canaries.timeouts if policy.soft_timeouts else 0)


def _slows(policy: HealthPolicy, state: Health) -> int:
    """Return the consecutive slow reports, including timeouts while the engine makes progress."""
    return state.slowness.reports + (state.canaries.timeouts if policy.soft_timeouts else 0)


def _step(policy: HealthPolicy, state: Health) -> float:
    """Return the ramp's weight after the good canaries since the last step."""
    higher = [weight for weight in (*policy.ramp, 1.0) if weight > state.ramp]
    return higher[min(state.canaries.goods, len(higher)) - 1]


def _from_suspicious(policy: HealthPolicy, state: Health) -> Move | None:
    on_ramp = not state.joining and state.ramp < 1
    if _failures(policy, state) >= (1 if on_ramp else policy.failures_max):
        return UNHEALTHY, 0.0, state.canaries.failure
    if _slows(policy, state) >= policy.slows_max and not state.slowness.suspected and not state.joining:
        return SUSPICIOUS, min(state.unlimited, policy.suspicious_weight), "slow"
    if not state.canaries.goods or state.disputed or _blocked(policy, state):
        return None
    if state.slowness.suspected and state.canaries.quicks < policy.quicks_min:
        return None
    if not state.joining:
        return HEALTHY, state.ramp, "canary_passed"
    return HEALTHY, policy.ramp[0] if state.charges.convictions else 1.0, "joined"


def _blocked(policy: HealthPolicy, state: Health) -> bool:
    """Return whether a conviction prevents the return to service. Enough good canaries clear every conviction except silence."""
    if SILENT in state.charges.convictions or (state.intrusion and policy.eject_intruders):
        return True
    standing = [c for c in state.charges.convictions if c != ENGINE]
    return bool(standing) and state.canaries.streak < policy.good_to_acquit


def _returning(policy: HealthPolicy, state: Health) -> float:
    """Return the weight of a returning worker: the ramp's first step, or its former weight if it only failed to answer."""
    silent = state.reason in UNANSWERED and not state.canaries.wrong and not state.charges.convictions
    return max(policy.ramp[0], state.ramp) if policy.silence_returns_whole and silent else policy.ramp[0]


def _from_unhealthy(policy: HealthPolicy, state: Health, now: datetime) -> Move | None:
    if state.trials.passed and _failures(policy, state):
        return UNHEALTHY, 0.0, f"{RELAPSE}: {state.canaries.failure}"
    if state.trials.passed and not _blocked(policy, state):
        if state.exit.draining:
            return DRAINING, 0.0, "still_draining"
        return HEALTHY, _returning(policy, state), "trial_passed"
    if state.trials.failed >= policy.trials_max and not state.kept:
        return DRAINING, 0.0, TRIALS_FAILED
    dead_at = due_at(policy, state)
    if dead_at is not None and now >= dead_at:
        return DRAINING, 0.0, SILENT
    return None
