"""A worker's health: what canaries, devices and silence say about one life (instance) of it.

| from | on | to |
|---|---|---|
| (new instance) | WorkerJoined | SUSPICIOUS, weight 0, a canary is sent at once |
| SUSPICIOUS (joining) | good canary | HEALTHY, weight 1 |
| HEALTHY | failed canary | SUSPICIOUS, 0.5 |
| HEALTHY | slow (CanarySlow, or the frontends' WorkerSlow) three times in a row | SUSPICIOUS, 0.5; slowness goes no further |
| SUSPICIOUS | good canary (three not-slow ones, if slow was the reason) | HEALTHY |
| SUSPICIOUS | third failed canary in a row | UNHEALTHY, 0 |
| any but DEAD | conviction: confirmed mismatch, non-finite, fatal device or engine fault, silence | UNHEALTHY, 0 |
| UNHEALTHY | the breaker's trial passes | HEALTHY, 0.25, then 0.5, 1.0 with each good canary |
| HEALTHY (ramp) | failed canary | UNHEALTHY, 0 |
| UNHEALTHY | trials_max trials failed in a row, or silent for dead_after | DRAINING, then DEAD when nothing is in flight |
| any but DEAD | DrainRequested, ShutdownBegan | DRAINING, 0 |
| DRAINING | empty and left, or deadline | DEAD |
| DRAINING | ResumeRequested, then a good canary | HEALTHY by the ramp |
| HEALTHY, SUSPICIOUS | DeviceFaulted with a weight, DeviceRecovered | the same, at most that weight |
| any | WorkerLeft | DEAD |
| DEAD | anything about this instance | DEAD |

All other pairs change nothing. Whom the ejection budget keeps in service is not given up for failed trials.

What a reader would get wrong: a conviction of hardware or weights (corruption, a device fault) outlives the instance.
It blocks every way back to HEALTHY until an operator resumes the worker, the device is reported recovered, or
`good_to_acquit` good canaries came in a row: one lucky canary does not clear a corrupt worker. And a good canary is
one with the right answer, however slow; only a suspicion of slowness asks for more.

A device's limit (throttled clocks, a lost link) is no doubt: it caps the weight, the least of several counts, and moves
nothing else. It ends with the device's recovery, an operator's word or the instance, whose successor says anew what limits it.

Here is what is known (`Health`) and what each fact adds to it (`evolve`); which move is due is `health_moves`.
"""

from dataclasses import dataclass
from datetime import datetime

from events.decisions import (
    BreakerClosed,
    BreakerOpened,
    DrainEnded,
    HealthChanged,
    HealthStatus,
    WeightCapped,
)
from events.fact import Fact
from events.frozen import replace
from events.observations import (
    CanaryFailed,
    CanaryPassed,
    CanarySlow,
    DeviceFaulted,
    DeviceRecovered,
    DrainRequested,
    EngineFaulted,
    ResumeRequested,
    ShutdownBegan,
    WorkerHeard,
    WorkerJoined,
    WorkerLeft,
    WorkerSilent,
    WorkerSlow,
    WorkerSlowCleared,
)

HEALTHY, SUSPICIOUS, UNHEALTHY, DRAINING, DEAD = HealthStatus
CORRUPT, SILENT, ENGINE, DEVICE = "corrupt", "silent", "engine", "device"  # convictions; a device's names it
CORRUPT_REASONS = ("token_mismatch", "logit_drift", "non_finite")  # reasons of a HealthChanged for corruption
TRIALS_FAILED = "trials_failed"
LIMITED = "device_limit"  # reason of a HealthChanged that only a device's limit has moved
CONVICTIONS_MAX = 16  # of one worker; more devices than that are one broken host
FRONTENDS_MAX = 64  # whose reports of slowness are counted as one


@dataclass(frozen=True, slots=True)
class Health:
    """One worker's health in its current life."""

    worker: str
    instance: str
    status: HealthStatus = SUSPICIOUS
    weight: float = 0.0
    reason: str = "joined"
    joining: bool = True  # has not been HEALTHY in this life
    ramp: float = 0.0  # the weight that it had when it was HEALTHY last; below 1 while the ramp goes on
    failures: int = 0  # canaries failed in a row, since it was last HEALTHY or became UNHEALTHY
    failure: str = ""  # the reason of the last one
    goods: int = 0  # good canaries in a row, since the last move
    streak: int = 0  # good canaries in a row, since the last conviction
    slows: int = 0  # slow reports in a row: of canaries, and of the frontends together
    slow_at: tuple[str, ...] = ()  # frontends whose reports were counted as one with the last
    quicks: int = 0  # not-slow good canaries in a row, since the last move
    slow: bool = False  # slowness is a reason of the present suspicion
    convictions: tuple[str, ...] = ()  # what stands against it
    accused: str = ""  # the reason of a conviction that no decision has answered yet
    proven: bool = False  # it was taken out of service for more than doubt, and has not been HEALTHY since
    disputed: tuple[str, ...] = ()  # canaries over whose goldens it is at odds with another worker
    trial_passed: bool = False  # the breaker closed since it became UNHEALTHY
    trials_failed: int = 0  # in a row
    kept: bool = False  # the ejection budget holds it in service
    leaving: str = ""  # why it is to drain, until a decision has answered
    draining: bool = False  # a drain is in force, even while it is UNHEALTHY
    given_up: bool = False  # drained by this machine: dead as soon as it is empty
    resumed: bool = False  # an operator wants it back; a good canary will do
    over: str = ""  # how the drain ended
    left: str = ""  # how its process ended
    silent_since: datetime | None = None  # by the clock of the controller that said so
    moved_by: int = 0  # number of the last decision about its health
    limits: tuple[tuple[str, float], ...] = ()  # (device and class, the weight that it leaves at most)
    unlimited: float = 0.0  # the weight without those limits
    cause: str = ""  # id of the fact that spoke last

    @property
    def limit(self) -> float:
        """The weight that its devices leave it at most."""
        return min(weight for _, weight in self.limits) if self.limits else 1.0

    @property
    def corrupt(self) -> bool:
        """Whether wrong answers have convicted it."""
        return CORRUPT in self.convictions

    @property
    def convicted(self) -> bool:
        """Whether anything but doubt stands against it, or has taken it out of service: it is never kept there.

        What stood against it may be over (it is heard again, an operator takes its part) before its trial has passed.
        """
        return self.proven or bool(self.convictions)


def rejoin(previous: Health, joined: WorkerJoined, cause: str = "") -> Health:
    """Return the health of a worker's next life. Kept are only the convictions of hardware and weights."""
    carried = tuple(c for c in previous.convictions if c not in (SILENT, ENGINE))
    return Health(joined.worker, joined.instance, convictions=carried, cause=cause)


def evolve(state: Health, fact: Fact, cause: str = "") -> Health:
    """Absorb one fact about this worker and instance."""
    if state.status is DEAD:
        return state
    match fact:
        case CanaryPassed():
            return _good(state, fact.sent_under, False, cause)
        case CanarySlow() | CanaryFailed(reason="latency_spike"):
            return _good(state, fact.sent_under, True, cause)
        case CanaryFailed():
            return _failed(state, fact, cause)
        case HealthChanged():
            return _moved(state, fact)
        case BreakerClosed():
            return replace(state, trial_passed=state.status is UNHEALTHY, trials_failed=0, failures=0)
        case BreakerOpened():
            failed = state.trials_failed + fact.reason.startswith("trial_failed")
            return replace(state, trial_passed=False, trials_failed=failed, cause=f"decision:{fact.number}")
        case WeightCapped():
            return replace(state, kept=fact.weight is not None)
        case _:
            return _life(state, fact, cause)


def _life(state: Health, fact: Fact, cause: str) -> Health:
    """Absorb a fact that no canary told."""
    match fact:
        case WorkerSlow():
            return _slow(state, fact.frontend, cause)
        case WorkerSlowCleared():
            return replace(state, slows=0, slow_at=()) if state.slows else state
        case WorkerSilent():
            return _convict(state, SILENT, SILENT, cause)
        case WorkerHeard():
            return _heard(state)
        case DeviceFaulted(fatal=True):
            return _convict(
                state, _device(fact), f"device_fault: {fact.fault_class} {fact.code}".strip(), cause
            )
        case DeviceFaulted(weight=float() | int()):
            return _limit(state, _device(fact), fact.weight, cause)
        case DeviceRecovered():
            return _limit(_clear(state, _device(fact)), _device(fact), None, cause)
        case EngineFaulted(fatal=True):
            return _convict(state, ENGINE, f"engine_fault: {fact.reason}", cause)
        case DrainRequested():
            return _leave(state, "operator", cause)
        case ShutdownBegan():
            return _leave(state, f"shutdown: {fact.mode}", cause)
        case ResumeRequested():
            return _resume(state, cause)
        case DrainEnded() if fact.outcome != "resumed" and not state.resumed:
            return replace(state, over=fact.outcome, cause=f"decision:{fact.number}")
        case WorkerLeft():
            return replace(state, left=f"left: {fact.mode}", cause=cause)
        case _:
            return state


def at_odds(state: Health, canaries: tuple[str, ...], cause: str) -> Health:
    """Take the canaries over whose goldens this worker is at odds with another."""
    if state.disputed == canaries or state.status is DEAD:
        return state
    return replace(state, disputed=canaries, cause=cause)


def _device(fact: DeviceFaulted | DeviceRecovered) -> str:
    return f"{DEVICE} {fact.device} {fact.fault_class}"


def _limit(state: Health, device: str, weight: float | None, cause: str) -> Health:
    """Take the limit that a device sets now; None: it sets none any more."""
    others = tuple(limit for limit in state.limits if limit[0] != device)
    if weight is None:
        return replace(state, limits=others, cause=cause) if others != state.limits else state
    if not 0 <= weight <= 1 or len(others) >= CONVICTIONS_MAX:
        return state
    return replace(state, limits=(*others, (device, weight)), cause=cause)


def _good(state: Health, sent_under: int, slow: bool, cause: str) -> Health:
    """Count a right answer. One that was asked for before the last move says nothing about what followed."""
    if sent_under < state.moved_by:
        return state
    calm = state.status is HEALTHY and state.ramp >= 1 and not state.convictions
    if calm and not slow and not state.failures and not state.slows and not state.disputed:
        return state
    if SILENT in state.convictions and not state.accused:
        state = _heard(state)
    return replace(
        state,
        failures=0,
        goods=state.goods + 1,
        streak=state.streak + 1,
        slows=state.slows + 1 if slow else 0,
        slow_at=state.slow_at if slow else (),
        quicks=0 if slow else state.quicks + 1,
        cause=cause,
    )


def _slow(state: Health, frontend: str, cause: str) -> Health:
    """Count a frontend's report. What several frontends find in the same window is one finding: it counts again when
    one of them says it again."""
    if frontend in state.slow_at or not state.slow_at or len(state.slow_at) >= FRONTENDS_MAX:
        return replace(state, slows=state.slows + 1, slow_at=(frontend,), quicks=0, cause=cause)
    return replace(state, slow_at=(*state.slow_at, frontend), quicks=0, cause=cause)


def _failed(state: Health, fact: CanaryFailed, cause: str) -> Health:
    mismatch = fact.reason in ("token_mismatch", "logit_drift") and fact.confirmed and fact.golden != "none"
    if mismatch or fact.reason == "non_finite":
        state = _convict(state, CORRUPT, fact.reason, cause)
    elif fact.sent_under < state.moved_by:
        return state
    return replace(
        state, failures=state.failures + 1, failure=fact.reason, goods=0, streak=0, quicks=0, cause=cause
    )


def _convict(state: Health, conviction: str, reason: str, cause: str) -> Health:
    """Hold something against the worker. Only what is new, or belies a recovery, asks for a decision."""
    new = conviction not in state.convictions and len(state.convictions) < CONVICTIONS_MAX
    known_bad = state.status is UNHEALTHY or (state.status is DRAINING and state.given_up)
    news = new or state.trial_passed or not known_bad
    return replace(
        state,
        convictions=(*state.convictions, conviction) if new else state.convictions,
        accused=reason if news else state.accused,
        streak=0,
        goods=0,
        resumed=False,
        cause=cause if news else state.cause,
    )


def _heard(state: Health) -> Health:
    if SILENT not in state.convictions:
        return state
    return replace(_clear(state, SILENT), silent_since=None)


def _clear(state: Health, conviction: str) -> Health:
    if conviction not in state.convictions:
        return state
    left = tuple(c for c in state.convictions if c != conviction)
    return replace(state, convictions=left, accused=state.accused if left else "")


def _leave(state: Health, reason: str, cause: str) -> Health:
    if state.status is DRAINING:
        return replace(state, resumed=False)
    return replace(state, leaving=reason, cause=cause)


def _resume(state: Health, cause: str) -> Health:
    """Take an operator's word that the worker is well: only silence cannot be argued away."""
    silent = tuple(c for c in state.convictions if c == SILENT)
    return replace(
        state,
        convictions=silent,
        accused=state.accused if silent else "",
        disputed=(),
        leaving="",
        draining=False,
        given_up=False,
        resumed=state.status is DRAINING,
        over="",
        goods=0,
        trials_failed=0,
        limits=(),
        cause=cause,
    )


def _moved(state: Health, fact: HealthChanged) -> Health:
    """Take the consequence of a decision."""
    unlimited = fact.weight if fact.unlimited is None else fact.unlimited
    if fact.reason == LIMITED:
        return replace(state, weight=fact.weight, unlimited=unlimited, cause=f"decision:{fact.number}")
    moved = replace(
        state,
        status=fact.after,
        weight=fact.weight,
        unlimited=unlimited,
        reason=fact.reason,
        goods=0,
        quicks=0,
        accused="",
        trial_passed=False,
        moved_by=fact.number,
        cause=f"decision:{fact.number}",
    )
    match fact.after:
        case HealthStatus.HEALTHY:
            return _anew(state, fact, unlimited)
        case HealthStatus.SUSPICIOUS:
            slow = state.slow or fact.reason == "slow"
            if slow:
                moved = replace(moved, slows=0, slow_at=())
            return replace(moved, slow=slow)
        case HealthStatus.UNHEALTHY:
            since = fact.decided_at if SILENT in state.convictions else None
            proven = state.proven or bool(state.convictions)
            return replace(
                moved, failures=0, slow=False, proven=proven, silent_since=state.silent_since or since
            )
        case HealthStatus.DRAINING:
            given_up = fact.reason in (SILENT, TRIALS_FAILED) or (state.draining and state.given_up)
            return replace(
                moved,
                accused=state.accused,  # is answered next
                leaving="",
                draining=True,
                given_up=given_up,
                resumed=False,
                over="",
            )
        case _:
            return moved


def _anew(state: Health, fact: HealthChanged, unlimited: float) -> Health:
    """Begin anew: HEALTHY, with nothing held against it. Kept are only whose health it is, what the ejection budget said,
    a dispute, a wish to drain it, a device's limit, and how its process ended.
    """
    return Health(
        state.worker,
        state.instance,
        HEALTHY,
        fact.weight,
        fact.reason,
        joining=False,
        ramp=unlimited,
        kept=state.kept,
        disputed=state.disputed,
        left=state.left,
        leaving=state.leaving,
        moved_by=fact.number,
        limits=state.limits,
        unlimited=unlimited,
        cause=f"decision:{fact.number}",
    )
