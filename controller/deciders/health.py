"""The health of one instance of a worker, from canaries, devices, operators and silence.

| from | on | to |
|---|---|---|
| (new instance) | WorkerJoined | SUSPICIOUS, weight 0, a canary is sent at once |
| SUSPICIOUS (joining) | good canary | HEALTHY, weight 1; a new lineage first needs an agreed golden |
| HEALTHY | failed canary | SUSPICIOUS, 0.5 |
| HEALTHY | slow (CanarySlow, or the frontends' WorkerSlow) three times in a row | SUSPICIOUS, 0.5; slowness goes no further |
| any | a canary that times out while the engine answers other requests | as for slow |
| SUSPICIOUS | good canary (three not-slow ones, if slow was the reason) | HEALTHY |
| SUSPICIOUS | third failed canary in a row | UNHEALTHY, 0 |
| any but DEAD | conviction: confirmed mismatch, non-finite, fatal device or engine fault, silence | UNHEALTHY, 0 |
| UNHEALTHY | the breaker's trial passes | HEALTHY, 0.25, then 0.5, 1.0 with each good canary |
| UNHEALTHY only for missing answers | the breaker's trial passes | HEALTHY, with the weight that it had |
| HEALTHY (ramp) | failed canary | UNHEALTHY, 0 |
| UNHEALTHY | trials_max trials failed in a row, or silent for dead_after | DRAINING, then DEAD when nothing is in flight |
| any but DEAD | DrainRequested, ShutdownBegan | DRAINING, 0 |
| DRAINING | empty and left, or deadline | DEAD |
| DRAINING | ResumeRequested, then a good canary | HEALTHY by the ramp |
| HEALTHY, SUSPICIOUS | DeviceFaulted with a weight, DeviceRecovered | the status stays, at most that weight |
| any but DEAD | IntrusionRefused with `eject`, of this instance | UNHEALTHY, until an operator resumes it |
| any | WorkerLeft | DEAD |
| DEAD | anything about this instance | DEAD |

The numbers are routing weights. All other combinations of state and fact change nothing. A worker that the ejection budget
keeps in service is not given up for failed trials.

A conviction of hardware or weights (corruption, a device fault) outlives the instance. The conviction prevents the return to
HEALTHY until an operator resumes the worker, the device is reported recovered, or `good_to_acquit` consecutive canaries are
good. One canary is not enough, because a corrupt worker can answer it correctly by chance. A good canary is one with the
right answer, even if the answer is slow. A worker that is suspected of slowness must also answer at normal speed before it is
HEALTHY again.

A device's limit (throttled clocks, a lost link) is not a suspicion. The limit only caps the worker's weight, and of several
limits the lowest applies. A limit ends when the device recovers, when an operator resumes the worker, or when the instance
ends. The next instance reports its own limits.

This module applies each fact (`evolve`) to the state (`health_state.Health`). `health_state.decide` decides which transition
is due.
"""

from controller.deciders.health_state import (
    CORRUPT,
    DEAD,
    DEVICE,
    DRAINING,
    ENGINE,
    HEALTHY,
    LIMITED,
    NEW_LINEAGE,
    SILENT,
    TRIALS_FAILED,
    UNANSWERED,
    UNHEALTHY,
    Canaries,
    Charges,
    Health,
    Slowness,
    Trials,
    evidence,
    outvoted_charges,
    redeemed,
    without,
)
from events import decisions as decided
from events import observations as seen
from events.fact import Fact
from events.frozen import replace

CONVICTIONS_MAX = 16  # per worker; more devices than that are one broken host
FRONTENDS_MAX = 64  # frontends with slowness reports that are counted as one


def rejoin(previous: Health, new: Health, *, new_lineage: bool = False) -> Health:
    """Return the health of a worker's next instance: `new`, with the earlier convictions of hardware and weights.

    The earlier convictions are those in `previous`. Convictions by goldens of another lineage (what the engine reports about
    its weights) are dropped, because the new lineage has its own goldens.
    """
    before = previous.charges
    if new_lineage and not before.not_finite:
        kept = tuple(c for c in before.convictions if c != CORRUPT)
        before = replace(before, convictions=kept, goldens=(), void=(), own_goldens=())
    charges = replace(
        new.charges,
        convictions=tuple(c for c in before.convictions if c not in (SILENT, ENGINE)),
        goldens=before.goldens,
        void=before.void,
        own_goldens=before.own_goldens,
        not_finite=before.not_finite,
    )
    return replace(new, charges=charges)


def evolve(state: Health, fact: Fact, cause: str = "") -> Health:
    """Return the health of a worker instance after one fact about it. A DEAD instance never changes."""
    if state.status is DEAD:
        return state
    match fact:
        case seen.CanaryPassed() | seen.CanarySlow():
            if state.charges.void:
                charges = redeemed(state.charges, fact.canary, fact.sent_under)
                state = replace(state, charges=charges)
            return _good(state, fact.sent_under, isinstance(fact, seen.CanarySlow), cause)
        case seen.CanaryFailed(reason="latency_spike"):
            return _good(state, fact.sent_under, True, cause)
        case seen.CanaryFailed():
            return _failed(state, fact, cause)
        case decided.HealthChanged():
            return _moved(state, fact)
        case decided.BreakerClosed():
            trials = replace(state.trials, passed=state.status is UNHEALTHY, failed=0)
            return replace(state, trials=trials, canaries=replace(state.canaries, failures=0, timeouts=0))
        case decided.BreakerOpened():
            failed = state.trials.failed + fact.reason.startswith("trial_failed")
            trials = replace(state.trials, passed=False, failed=failed)
            return replace(state, trials=trials, cause=f"decision:{fact.number}")
        case decided.WeightCapped():
            return replace(state, kept=fact.weight is not None)
        case _:
            return _life(state, fact, cause)


def _life(state: Health, fact: Fact, cause: str) -> Health:
    """Apply a fact about slowness, silence, devices, the engine, a drain, a resume or the end of the process."""
    match fact:
        case seen.WorkerSlow():
            return _slow(state, fact.frontend, cause)
        case seen.WorkerSlowCleared():
            return replace(state, slowness=_over(state.slowness))
        case seen.WorkerSilent():
            return _convict(state, SILENT, SILENT, cause)
        case seen.WorkerHeard():
            return _heard(state)
        case seen.DeviceFaulted(fatal=True):
            reason = f"device_fault: {fact.fault_class} {fact.code}".strip()
            return _convict(state, _device(fact), reason, cause)
        case seen.DeviceFaulted(weight=float() | int()):
            return _limit(state, _device(fact), fact.weight, cause)
        case seen.DeviceRecovered():
            cleared = replace(state, charges=without(state.charges, _device(fact)))
            return _limit(cleared, _device(fact), None, cause)
        case seen.EngineFaulted(fatal=True):
            return _convict(state, ENGINE, f"engine_fault: {fact.reason}", cause)
        case seen.DrainRequested():
            return _leave(state, "operator", cause)
        case seen.ShutdownBegan():
            return _leave(state, f"shutdown: {fact.mode}", cause)
        case seen.ResumeRequested():
            return _resume(state, cause)
        case decided.DrainEnded() if fact.outcome != "resumed" and not state.exit.resumed:
            return replace(
                state, exit=replace(state.exit, over=fact.outcome), cause=f"decision:{fact.number}"
            )
        case seen.WorkerLeft():
            return replace(state, exit=replace(state.exit, left=f"left: {fact.mode}"), cause=cause)
        case _:
            return state


def at_odds(state: Health, canaries: tuple[str, ...], cause: str) -> Health:
    """Record the canaries on which the worker's answers contradict another worker's answers."""
    if state.disputed == canaries or state.status is DEAD:
        return state
    return replace(state, disputed=canaries, cause=cause)


def intruded(state: Health, tried: str, cause: str) -> Health:
    """Record a forbidden action that the worker attempted, unless an earlier one is recorded."""
    if state.intrusion or state.status is DEAD:
        return state
    return replace(state, intrusion=tried or "?", cause=cause)


def _device(fact: seen.DeviceFaulted | seen.DeviceRecovered) -> str:
    return f"{DEVICE} {fact.device} {fact.fault_class}"


def _limit(state: Health, device: str, weight: float | None, cause: str) -> Health:
    """Set the highest weight (0 to 1) that a device allows. `weight` None removes the device's limit."""
    others = tuple(limit for limit in state.limits if limit[0] != device)
    if weight is None:
        return replace(state, limits=others, cause=cause) if others != state.limits else state
    if not 0 <= weight <= 1 or len(others) >= CONVICTIONS_MAX:
        return state
    return replace(state, limits=(*others, (device, weight)), cause=cause)


def _good(state: Health, sent_under: int, slow: bool, cause: str) -> Health:
    """Count a right answer, unless its canary was sent before the last decision about the worker's health."""
    if sent_under < state.moved_by:
        return state
    canaries, slowness = state.canaries, state.slowness
    calm = state.status is HEALTHY and state.ramp >= 1 and not state.charges.convictions
    if calm and not slow and not canaries.failures and not slowness.reports and not state.disputed:
        return state
    if SILENT in state.charges.convictions and not state.charges.accused:
        state = _heard(state)
    goods, streak, quicks = canaries.goods + 1, canaries.streak + 1, 0 if slow else canaries.quicks + 1
    canaries = replace(canaries, failures=0, timeouts=0, goods=goods, streak=streak, quicks=quicks)
    slowness = replace(slowness, reports=slowness.reports + 1) if slow else _over(slowness)
    return replace(state, canaries=canaries, slowness=slowness, cause=cause)


def _slow(state: Health, frontend: str, cause: str) -> Health:
    """Count a frontend's report that the worker is slow.

    Several frontends may report the same slowness. Their reports form a series, which counts as one report. A new series
    starts when a frontend of the current series reports again, or when the series has FRONTENDS_MAX frontends.
    """
    known = state.slowness
    if frontend in known.frontends or not known.frontends or len(known.frontends) >= FRONTENDS_MAX:
        slowness = replace(known, reports=known.reports + 1, frontends=(frontend,))
    else:
        slowness = replace(known, frontends=(*known.frontends, frontend))
    return replace(state, slowness=slowness, canaries=replace(state.canaries, quicks=0), cause=cause)


def _over(slowness: Slowness) -> Slowness:
    """Reset the count of consecutive slowness reports. A suspicion of slowness that was already decided stays."""
    return replace(slowness, reports=0, frontends=()) if slowness.reports else slowness


def _failed(state: Health, fact: seen.CanaryFailed, cause: str) -> Health:
    mismatch = fact.reason in ("token_mismatch", "logit_drift") and fact.confirmed and fact.golden != "none"
    if mismatch or fact.reason == "non_finite":
        state = _convict(state, CORRUPT, fact.reason, cause)
        charges = evidence(state.charges, fact, agreed=mismatch and fact.golden == "agreed")
        state = replace(state, charges=charges)
    elif fact.sent_under < state.moved_by:
        return state
    canaries = state.canaries
    soft = fact.reason == "timeout" and fact.engine_went_on
    canaries = replace(
        canaries,
        failures=canaries.failures + 1,
        failure=fact.reason,
        goods=0,
        streak=0,
        quicks=0,
        timeouts=canaries.timeouts + soft,
        wrong=canaries.wrong or fact.reason not in UNANSWERED,
    )
    return replace(state, canaries=canaries, cause=cause)


def outvoted(state: Health, canary: str, number: int, *, agrees: bool) -> Health:
    """Return the health after decision `number` overruled the golden of `canary`.

    `agrees` tells whether this worker gave the answer that overruled the golden.
    """
    left = outvoted_charges(state.charges, canary, number, agrees=agrees)
    if left is state.charges:
        return state
    canaries = state.canaries
    # No decision has reacted to the accusation yet, so the answer is not counted as a failed canary either.
    if state.charges.accused and not left.accused:
        canaries = replace(canaries, failures=0, timeouts=0, wrong=False)
    return replace(state, charges=left, canaries=canaries)


def _convict(state: Health, conviction: str, reason: str, cause: str) -> Health:
    """Record a conviction of the worker.

    A decision becomes due only in three cases: the conviction is new, the worker has passed its trial, or the worker is neither
    UNHEALTHY nor given up.
    """
    standing = state.charges.convictions
    new = conviction not in standing and len(standing) < CONVICTIONS_MAX
    known_bad = state.status is UNHEALTHY or (state.status is DRAINING and state.exit.given_up)
    news = new or state.trials.passed or not known_bad
    charges = state.charges
    if new:
        charges = replace(charges, convictions=(*standing, conviction))
    if news:
        state, charges = replace(state, cause=cause), replace(charges, accused=reason)
    canaries, exit = replace(state.canaries, streak=0, goods=0), replace(state.exit, resumed=False)
    return replace(state, charges=charges, canaries=canaries, exit=exit)


def _heard(state: Health) -> Health:
    if SILENT not in state.charges.convictions:
        return state
    return replace(state, charges=replace(without(state.charges, SILENT), silent_since=None))


def _leave(state: Health, reason: str, cause: str) -> Health:
    if state.status is DRAINING:
        return replace(state, exit=replace(state.exit, resumed=False))
    return replace(state, exit=replace(state.exit, leaving=reason), cause=cause)


def _resume(state: Health, cause: str) -> Health:
    """Apply an operator's resume.

    Device limits, disputes, a recorded intrusion, and all convictions except silence are cleared.
    """
    silent = tuple(c for c in state.charges.convictions if c == SILENT)
    accused = state.charges.accused if silent else ""
    resumed = state.status is DRAINING
    return replace(
        state,
        limits=(),
        disputed=(),
        intrusion="",
        canaries=replace(state.canaries, goods=0),
        charges=replace(
            state.charges,
            convictions=silent,
            accused=accused,
            goldens=(),
            void=(),
            own_goldens=(),
            acquitted=False,
            not_finite=False,
        ),
        trials=replace(state.trials, failed=0),
        exit=replace(state.exit, leaving="", draining=False, given_up=False, resumed=resumed, over=""),
        cause=cause,
    )


def _moved(state: Health, fact: decided.HealthChanged) -> Health:
    """Apply a decision about the worker's health."""
    unlimited = fact.weight if fact.unlimited is None else fact.unlimited
    cause = f"decision:{fact.number}"
    if fact.reason == NEW_LINEAGE:
        return replace(state, reason=fact.reason, cause=cause)
    if fact.reason == LIMITED:
        return replace(state, weight=fact.weight, unlimited=unlimited, cause=cause)
    moved = replace(
        state,
        status=fact.after,
        weight=fact.weight,
        unlimited=unlimited,
        reason=fact.reason,
        moved_by=fact.number,
        cause=cause,
    )
    if fact.after is HEALTHY:
        return _well(moved)
    canaries = replace(state.canaries, goods=0, quicks=0)
    charges = replace(state.charges, accused="")
    moved = replace(moved, canaries=canaries, charges=charges, trials=replace(state.trials, passed=False))
    match fact.after:
        case decided.HealthStatus.SUSPICIOUS:
            slow = state.slowness.suspected or fact.reason == "slow"
            return replace(moved, slowness=replace(_over(state.slowness), suspected=True)) if slow else moved
        case decided.HealthStatus.UNHEALTHY:
            return _out_of_service(moved, fact)
        case decided.HealthStatus.DRAINING:
            given_up = fact.reason in (SILENT, TRIALS_FAILED) or (state.exit.draining and state.exit.given_up)
            drain = replace(state.exit, leaving="", draining=True, given_up=given_up, resumed=False, over="")
            # The accusation is handled by the next decision.
            return replace(moved, charges=state.charges, exit=drain)
        case decided.HealthStatus.DEAD:
            return replace(moved, dead_since=fact.decided_at)
        case _:
            return moved


def _well(moved: Health) -> Health:
    """Clear the evidence against a worker that becomes HEALTHY.

    Disputes, a drain request and device limits are kept.
    """
    return replace(
        moved,
        joining=False,
        ramp=moved.unlimited,
        canaries=Canaries(),
        slowness=Slowness(),
        charges=Charges(),
        trials=Trials(),
        exit=replace(moved.exit, draining=False, given_up=False, resumed=False, over=""),
    )


def _out_of_service(moved: Health, fact: decided.HealthChanged) -> Health:
    """Record the evidence against a worker that becomes UNHEALTHY.

    `proven` becomes true if a conviction is the reason, and `silent_since` is set for a silent worker.
    """
    charges = moved.charges
    since = fact.decided_at if SILENT in charges.convictions else None
    return replace(
        moved,
        canaries=replace(moved.canaries, failures=0, timeouts=0),
        slowness=replace(moved.slowness, suspected=False),
        charges=replace(
            charges,
            proven=charges.proven or bool(charges.convictions),
            silent_since=charges.silent_since or since,
        ),
    )
