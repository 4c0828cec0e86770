"""The state of a worker's health, its policy, and the decision about the next transition.

`health.evolve` updates the state. Each part of the state (`Canaries`, `Charges`, …) holds fields that are reset together:
`canaries=Canaries()` resets a part, and `replace(state.canaries, …)` changes a field. The due transition depends only on the
state and the time. It is therefore the same if it is computed late, twice, or after a crash.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TypeAlias

from controller.deciders.validation import STRICT, at_least, demand, share
from events.decisions import AboutWorker, HealthChanged, HealthStatus
from events.fact import Decision
from events.frozen import fast_constructor, replace
from events.observations import CanaryFailed

HEALTHY, SUSPICIOUS, UNHEALTHY, DRAINING, DEAD = HealthStatus
# Convictions; a device conviction names the device.
CORRUPT, SILENT, ENGINE, DEVICE = "corrupt", "silent", "engine", "device"
CORRUPT_REASONS = ("token_mismatch", "logit_drift", "non_finite")  # reasons of a HealthChanged for corruption
GOLDENS_MAX = 64  # goldens that convicted one worker; at most one per canary
UNANSWERED = (SILENT, "no_response", "timeout")  # reasons of a HealthChanged when no answer arrived
TRIALS_FAILED = "trials_failed"
INTRUSION = "intrusion"  # prefix of the reason of a HealthChanged that ejects an intruder
RELAPSE = "relapse"  # prefix of the reason of a HealthChanged of a worker that failed while it was returning
# Reason of a HealthChanged that holds a joining worker back until its goldens are agreed.
NEW_LINEAGE = "new_lineage"
LIMITED = "device_limit"  # reason of a HealthChanged caused only by a device's limit


@fast_constructor
@dataclass(frozen=True, slots=True)
class Canaries:
    """Counts of a worker's canary results."""

    failures: int = 0  # in a row, since it was last HEALTHY or became UNHEALTHY
    failure: str = ""  # the reason of the last one
    goods: int = 0  # good ones in a row, since the last move
    streak: int = 0  # good ones in a row, since the last conviction
    quicks: int = 0  # good ones at normal speed in a row, since the last move
    timeouts: int = 0  # of the failures: timeouts while the worker's engine answered other requests
    wrong: bool = False  # one returned a wrong answer or an error since it was last HEALTHY


@fast_constructor
@dataclass(frozen=True, slots=True)
class Slowness:
    """Reports by canaries and frontends that a worker is slow."""

    reports: int = 0  # in a row: from canaries, and from all frontends together
    frontends: tuple[str, ...] = ()  # frontends merged into the last report
    suspected: bool = False  # slowness is a reason for the present suspicion


@fast_constructor
@dataclass(frozen=True, slots=True)
class Charges:
    """Convictions of a worker, with their evidence. Unlike a suspicion, a conviction is beyond doubt."""

    convictions: tuple[str, ...] = ()  # corrupt, silent, engine, or a device with its fault class
    goldens: tuple[str, ...] = ()  # canaries with an agreed golden that convicted it of wrong answers
    # those with a golden that has been outvoted, and the number of that decision
    void: tuple[tuple[str, int], ...] = ()
    own_goldens: tuple[str, ...] = ()  # canaries that convicted it by a golden it had proposed itself
    not_finite: bool = False  # non-finite answers convicted it
    acquitted: bool = False  # the goldens that convicted it were outvoted: only its trial is missing
    accused: str = ""  # the reason of a conviction to which no decision has reacted yet
    proven: bool = False  # taken out of service on more than doubt, and not HEALTHY since
    silent_since: datetime | None = None  # by the clock of the controller that decided it


@fast_constructor
@dataclass(frozen=True, slots=True)
class Trials:
    """Results of the breaker's trials of a worker since it became UNHEALTHY."""

    passed: bool = False  # the breaker closed since it became UNHEALTHY
    failed: int = 0  # in a row


@fast_constructor
@dataclass(frozen=True, slots=True)
class Exit:
    """The state of a worker's permanent exit from service: a drain, or the end of its process."""

    leaving: str = ""  # reason of a requested drain, until a decision has reacted
    draining: bool = False  # a drain is in force, even while it is UNHEALTHY
    given_up: bool = False  # drained because health gave it up: dead as soon as it is empty
    resumed: bool = False  # an operator resumed it; one good canary returns it to service
    over: str = ""  # how the drain ended
    left: str = ""  # how its process ended


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a worker's current instance."""

    worker: str
    instance: str
    status: HealthStatus = SUSPICIOUS
    weight: float = 0.0
    unlimited: float = 0.0  # the weight without the devices' limits
    limits: tuple[tuple[str, float], ...] = ()  # (device and fault class, highest weight that it allows)
    ramp: float = 0.0  # its weight when last HEALTHY; below 1 during the ramp
    reason: str = "joined"
    joining: bool = True  # this instance has not been HEALTHY yet
    disputed: tuple[str, ...] = ()  # canaries on which it disagrees with another worker
    intrusion: str = ""  # the forbidden action for which it is to be ejected
    kept: bool = False  # the ejection budget keeps it in service
    canaries: Canaries = Canaries()
    slowness: Slowness = Slowness()
    charges: Charges = Charges()
    trials: Trials = Trials()
    exit: Exit = Exit()
    moved_by: int = 0  # number of the last decision about its health
    dead_since: datetime | None = None  # by the clock of the controller that decided it
    cause: str = ""  # id of the last fact that changed this state

    def about(self, now: datetime) -> AboutWorker:
        """Return the fields that all decisions about this worker have in common. `now` is the decision's time."""
        return {"worker": self.worker, "instance": self.instance, "decided_at": now, "cause": self.cause}

    @property
    def held(self) -> bool:
        """Whether the worker is held back because its lineage (reported weights) has no agreed goldens yet."""
        return self.joining and self.status is SUSPICIOUS and self.reason == NEW_LINEAGE

    @property
    def limit(self) -> float:
        """The highest weight that the worker's devices allow, 0 to 1."""
        return min(weight for _, weight in self.limits) if self.limits else 1.0

    @property
    def corrupt(self) -> bool:
        """Whether wrong answers have convicted the worker.

        The answers of such a worker may not be trusted, even if it serves as the last worker of its model.
        """
        return CORRUPT in self.charges.convictions

    @property
    def convicted(self) -> bool:
        """Whether a conviction has taken the worker out of service, or is about to do so.

        The ejection budget never keeps such a worker. The value stays true until the worker is HEALTHY again, even if the
        evidence is gone earlier, for example because the worker sends heartbeats again.
        """
        return self.charges.proven or bool(self.charges.convictions)


def evidence(charges: Charges, fact: CanaryFailed, *, agreed: bool) -> Charges:
    """Return the charges after a wrong or non-finite answer to a canary.

    `agreed` states which golden shows that the answer is wrong: an agreed one, or else the worker's own provisional
    golden.
    """
    if fact.reason == "non_finite":
        return replace(charges, not_finite=True)
    if not agreed:
        others = tuple(one for one in charges.own_goldens if one != fact.canary)[-GOLDENS_MAX + 1 :]
        return replace(charges, own_goldens=(*others, fact.canary))
    canary = fact.golden_canary
    others = tuple(one for one in charges.goldens if one != canary)[-GOLDENS_MAX + 1 :]
    void = tuple(one for one in charges.void if one[0] != canary)
    return replace(charges, goldens=(*others, canary), void=void)


def outvoted_charges(charges: Charges, canary: str, number: int, *, agrees: bool) -> Charges:
    """Return a worker's charges after decision `number` overruled the golden of `canary`.

    If the worker gave the answer that overruled the golden (`agrees`), the charge is dropped. For any other worker the charge
    becomes void: one good answer to this canary then drops the charge.
    """
    if canary not in charges.goldens and canary not in charges.own_goldens:
        return charges
    return lifted(charges, canary) if agrees else replace(charges, void=(*charges.void, (canary, number)))


def redeemed(charges: Charges, canary: str, sent_under: int) -> Charges:
    """Return the charges after a good answer to a canary. A void charge for that canary is dropped.

    The canary must have been sent after the decision that made the charge void.
    """
    void = any(name == canary and sent_under >= number for name, number in charges.void)
    return lifted(charges, canary) if void else charges


def lifted(charges: Charges, canary: str) -> Charges:
    """Remove from `charges` all records of wrong answers to `canary`, and return the rest.

    If no other golden and no non-finite answer convicts the worker, the conviction of corruption ends.
    """
    left = replace(
        charges,
        goldens=tuple(one for one in charges.goldens if one != canary),
        own_goldens=tuple(one for one in charges.own_goldens if one != canary),
        void=tuple(one for one in charges.void if one[0] != canary),
    )
    if left.goldens or left.own_goldens or left.not_finite:
        return left
    return replace(without(left, CORRUPT), acquitted=True)


def without(charges: Charges, conviction: str) -> Charges:
    """Return the charges without `conviction`.

    If no conviction is left, a decision that was due because of a conviction is no longer due.
    """
    if conviction not in charges.convictions:
        return charges
    left = tuple(c for c in charges.convictions if c != conviction)
    return replace(charges, convictions=left, accused=charges.accused if left else "")


Move: TypeAlias = tuple[HealthStatus, float, str]  # target status, weight before device limits, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """When suspicion takes a worker out of service, and how the worker returns."""

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
        rises = self.ramp and all(low < high for low, high in pairwise((0.0, *self.ramp)))
        demand(bool(rises) and max(self.ramp) <= 1, f"ramp is {self.ramp}: it must rise from above 0 to 1")


def decide(
    policy: HealthPolicy, state: Health, now: datetime, *, held: Callable[[], bool] = lambda: False
) -> tuple[Decision, ...]:
    """Return the due transition as a tuple of one decision; an empty tuple if none is due.

    `held` returns whether a joining worker must wait, because its lineage (reported weights) is new and has no agreed golden.
    """
    move = _due(policy, state, now) or _limited(state)
    if move is not None and move[0] is HEALTHY and state.joining and state.status is SUSPICIOUS and held():
        move = None if state.held else (SUSPICIOUS, 0.0, NEW_LINEAGE)
    if move is None:
        return ()
    after, weight, reason = move
    unlimited, weight = weight if weight > state.limit else None, min(weight, state.limit)
    changed = HealthChanged(
        **state.about(now),
        before=state.status,
        after=after,
        reason=reason,
        weight=weight,
        unlimited=unlimited,
    )
    return (changed,)


def due_at(policy: HealthPolicy, state: Health) -> datetime | None:
    """Return the time at which a silent worker is given up if no further fact arrives; None if it is not silent."""
    since = state.charges.silent_since
    return None if since is None else since + policy.dead_after


def _limited(state: Health) -> Move | None:
    """Return the change of weight that the devices' limits require; None if the weight needs no change."""
    if state.status is not HEALTHY and state.status is not SUSPICIOUS:
        return None
    left = min(state.unlimited, state.limit) if state.limits else state.unlimited
    if state.weight == left:
        return None
    return state.status, state.unlimited, LIMITED


def _due(policy: HealthPolicy, state: Health, now: datetime) -> Move | None:
    """Return the transition that is due; None if none is due.

    A drain request is handled before a new conviction. A worker with both therefore becomes DRAINING first, and UNHEALTHY by
    the next decision.
    """
    if state.status is DEAD:
        return None
    if (demanded := _demanded(policy, state)) is not None:
        return demanded
    if state.status is HEALTHY:
        return _from_healthy(policy, state)
    if state.status is SUSPICIOUS:
        return _from_suspicious(policy, state)
    if state.status is UNHEALTHY:
        return _from_unhealthy(policy, state, now)
    back = state.exit.resumed and state.canaries.goods >= 1 and not _blocked(policy, state)
    return (HEALTHY, policy.ramp[0], "resumed") if back else None


def _demanded(policy: HealthPolicy, state: Health) -> Move | None:
    """Return the transition for an ended process, a drain, a new conviction or an intrusion.

    None means that none of these applies. These reasons are checked before the rules that depend on the worker's present
    status.
    """
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
    return None


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
    """Return the number of consecutive failed canaries.

    With `soft_timeouts`, a timeout while the worker's engine makes progress does not count as a failure.
    """
    return state.canaries.failures - (state.canaries.timeouts if policy.soft_timeouts else 0)


def _slows(policy: HealthPolicy, state: Health) -> int:
    """Return the number of consecutive slowness reports.

    With `soft_timeouts`, this includes the canary timeouts while the worker's engine makes progress.
    """
    return state.slowness.reports + (state.canaries.timeouts if policy.soft_timeouts else 0)


def _step(policy: HealthPolicy, state: Health) -> float:
    """Return the next weight on the ramp.

    The weight rises by one step for each good canary since the last transition.
    """
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
    """Return whether a conviction or an intrusion prevents the worker's return to service.

    `good_to_acquit` consecutive good canaries outweigh every conviction except silence. An engine fault does not prevent the
    return if it is the only conviction.
    """
    if SILENT in state.charges.convictions or (state.intrusion and policy.eject_intruders):
        return True
    standing = [c for c in state.charges.convictions if c != ENGINE]
    return bool(standing) and state.canaries.streak < policy.good_to_acquit


def _returning(policy: HealthPolicy, state: Health) -> float:
    """Return the weight at which a worker returns to service.

    This is the first step of the ramp. With `silence_returns_whole`, a worker that was taken out of service for missing
    answers, and gave no wrong answer, gets its former weight if that is higher.
    """
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
