"""Invariants of decisions: checked against the ledger, the policy and a repeated settle."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TypeAlias

from controller.deciders.capacity import attainable, fleet_capacity
from controller.deciders.fleet import load
from controller.deciders.health_state import LIMITED
from controller.simulator.checks.watch import InvariantWatch, invariant
from events import codec
from events import decisions as decided
from events import observations as seen
from events.fact import Decision, Recorded

HEALTHY, SUSPICIOUS, UNHEALTHY, DRAINING, DEAD = decided.HealthStatus
LEGAL = {
    (SUSPICIOUS, HEALTHY), (SUSPICIOUS, SUSPICIOUS), (SUSPICIOUS, UNHEALTHY), (SUSPICIOUS, DRAINING), (SUSPICIOUS, DEAD),
    (HEALTHY, HEALTHY), (HEALTHY, SUSPICIOUS), (HEALTHY, UNHEALTHY), (HEALTHY, DRAINING), (HEALTHY, DEAD),
    (UNHEALTHY, HEALTHY), (UNHEALTHY, UNHEALTHY), (UNHEALTHY, DRAINING), (UNHEALTHY, DEAD),
    (DRAINING, HEALTHY), (DRAINING, UNHEALTHY), (DRAINING, DRAINING), (DRAINING, DEAD),
}  # fmt: skip
OUT = (UNHEALTHY, DRAINING, DEAD)
BreakerMoved: TypeAlias = decided.BreakerOpened | decided.BreakerHalfOpened | decided.BreakerClosed
BREAKER_FROM: dict[type[decided.WorkerDecision], tuple[str, ...]] = {
    decided.BreakerOpened: ("closed", "half_open"),
    decided.BreakerHalfOpened: ("open",),
    decided.BreakerClosed: ("half_open",),
}
# The degradation ladder of the design seed. It leaves three of level 4's knobs open: they keep their values of level 3.
LADDER = (
    decided.Knobs(),
    decided.Knobs(batch_size=0.75),
    decided.Knobs(batch_size=0.75, shed_tier="best_effort"),
    decided.Knobs(batch_size=0.5, shed_tier="best_effort", latency=2.0),
    decided.Knobs(batch_size=0.5, shed_tier="best_effort", latency=2.0, accept_new=False),
)
VOTES = (seen.GoldenProposed, seen.GoldenDisputed, seen.CanaryPassed, seen.CanarySlow, seen.WorkerJoined)


@invariant("before")
def decisions_gapless(watch: InvariantWatch, event: Recorded, fact: Decision) -> str | None:
    """Decisions are numbered from 1 without gaps."""
    before = watch.ledger.number
    return None if fact.number == before + 1 else f"decision {fact.number} follows {before}"


@invariant("before")
def one_writer(watch: InvariantWatch, event: Recorded, fact: Decision) -> str | None:
    """A controller that decides has read every earlier decision.

    Decisions that were appended together are exempt.
    """
    before = watch.decided
    if before is None or event.through >= before.seq:
        return None
    if (before.source, before.through, before.seq) == (event.source, event.through, event.seq - 1):
        return None
    return f"{event.source} had read up to {event.through}, and {before.source} had decided at {before.seq}"


@invariant("before", decided.WorkerDecision)
def cause_is_real(watch: InvariantWatch, event: Recorded, fact: decided.WorkerDecision) -> str | None:
    """The cause of a decision precedes the decision, and its controller had read the cause.

    `own_instance` checks that the cause concerns the same worker instance.
    """
    if not fact.cause:
        return None
    if fact.cause.startswith("decision:"):
        number = int(fact.cause.removeprefix("decision:"))
        return None if 0 < number < fact.number else f"decision {fact.number} is caused by {fact.cause}"
    seq, found = watch.ledger.observation(fact.cause)
    if found is None or seq > event.through:
        return f"{fact.kind()} through {event.through} is caused by {fact.cause}, which lies at {seq or None}"
    return None


@invariant("appended")
def batch_is_whole(watch: InvariantWatch, run: Sequence[Recorded]) -> str | None:
    """One append contains exactly the decisions that were due at the position up to which its controller had read."""
    decisions = [e.fact for e in run if isinstance(e.fact, Decision)]
    if isinstance(decisions[0], decided.Absorbed):
        return None if len(decisions) == 1 else "Absorbed is followed by other decisions in its batch"
    read = watch.shown[run[0].through]
    due = watch.seams.settle(watch.policy, read, decisions[0].decided_at)
    if tuple(decisions) != due:
        return f"at {run[0].through}, due were {_kinds(due)}, decided were {_kinds(decisions)}"
    return None


@invariant("appended")
def quiescence(watch: InvariantWatch, run: Sequence[Recorded]) -> str | None:
    """Right after a decision, no further decision is due."""
    last = run[-1].fact
    assert isinstance(last, Decision)
    more = watch.seams.settle(watch.policy, watch.reference.settled, last.decided_at)
    return f"after decision {last.number}, more is due at once: {_kinds(more)}" if more else None


def _kinds(decisions: Sequence[Decision]) -> str:
    return "[" + ", ".join(f"{d.number} {d.kind()} {getattr(d, 'instance', '')}" for d in decisions) + "]"


@invariant("before", decided.HealthChanged | BreakerMoved | decided.DrainStarted)
def dead_stays_dead(watch: InvariantWatch, event: Recorded, fact: decided.WorkerDecision) -> str | None:
    """No health, breaker or drain decision concerns a dead instance; only a new instance of the worker serves again."""
    return f"{fact.kind()} for {fact.instance}, which is dead" if fact.instance in watch.ledger.dead else None


@invariant("before", decided.HealthChanged)
def legal_transition(watch: InvariantWatch, event: Recorded, fact: decided.HealthChanged) -> str | None:
    """Each health change is in the transition table, starts at the current status, and carries a valid weight."""
    entry = watch.ledger.of(fact.worker, fact.instance)
    move = f"{fact.instance}: {fact.before} to {fact.after} ({fact.reason}) at weight {fact.weight}"
    if (fact.before, fact.after) not in LEGAL:
        return move
    if entry is not None and fact.before is not (was := entry.status or SUSPICIOUS):
        return f"{move}, but it was {was}"
    if fact.after in OUT:
        return move if fact.weight else None
    top = 1.0 if fact.after is HEALTHY else 0.5
    limited = fact.reason == LIMITED or fact.unlimited is not None
    fits = fact.weight <= top and (fact.weight > 0 or fact.after is SUSPICIOUS)
    return None if limited or fits else move


@invariant("before", decided.HealthChanged)
def limits_obeyed(watch: InvariantWatch, event: Recorded, fact: decided.HealthChanged) -> str | None:
    """No decision sets a worker's weight above the device limits that its controller had read."""
    entry = watch.ledger.of(fact.worker, fact.instance)
    left = entry.limit(event.through) if entry is not None else 1.0
    return (
        f"{fact.instance} has weight {fact.weight}, its devices allow {left}" if fact.weight > left else None
    )


@invariant("before", BreakerMoved)
def breaker_moves(watch: InvariantWatch, event: Recorded, fact: decided.WorkerDecision) -> str | None:
    """A breaker goes from closed to open, from open to half-open, and from half-open to open or closed."""
    entry = watch.ledger.of(fact.worker, fact.instance)
    if entry is not None and entry.position not in BREAKER_FROM[type(fact)]:
        return f"{fact.kind()} of {fact.instance}, but its breaker was {entry.position}"
    return None


@invariant("before", decided.BreakerOpened | decided.BreakerClosed)
def no_straggler(watch: InvariantWatch, event: Recorded, fact: decided.WorkerDecision) -> str | None:
    """No outcome of a request sent before a breaker's last transition changes the breaker."""
    entry = watch.ledger.of(fact.worker, fact.instance)
    match watch.ledger.observation(fact.cause)[1]:
        case seen.CanaryResult(sent_under=under):
            pass
        case seen.RequestFailed(routed_under=under) | seen.RequestsServed(routed_under=under):
            pass
        case _:
            return None
    if entry is not None and under is not None and under < entry.moved_by:
        return f"{fact.kind()} of {fact.instance} by an outcome sent under {under}, last moved by {entry.moved_by}"
    return None


@invariant("before", decided.BreakerOpened)
def in_a_row(watch: InvariantWatch, event: Recorded, fact: decided.BreakerOpened) -> str | None:
    """Only consecutive failures open a breaker, because a success resets the count.

    Only the facts that the controller had read are counted. A repeated fact counts once.
    """
    entry, least = watch.ledger.of(fact.worker, fact.instance), watch.policy.breaker.failures_max
    if entry is None or fact.reason.startswith(("unhealthy", "trial_failed")):
        return None
    if fact.reason.startswith("requests"):
        counted = [n for seq, under, n in entry.failures if seq <= event.through and under >= entry.moved_by]
        enough = max(counted, default=0) >= least
        return None if enough else f"{fact.instance}: {fact.reason}, counted {counted}"
    known = [bad for seq, under, bad in entry.results if seq <= event.through and under >= entry.moved_by]
    enough = all(known[-least:]) and len(known) >= least
    return None if enough else f"{fact.instance}: {fact.reason}, {known[-9:]}"


@invariant("before", decided.WorkerDecision)
def own_instance(watch: InvariantWatch, event: Recorded, fact: decided.WorkerDecision) -> str | None:
    """A fact about one worker instance causes no decision about another instance."""
    _, found = watch.ledger.observation(fact.cause)
    if found is None or (found.worker, found.instance) == (fact.worker, fact.instance):
        return None
    if found.worker != fact.worker and isinstance(fact, decided.HealthChanged) and isinstance(found, VOTES):
        return None  # goldens are voted on, so another worker's answer can raise or remove doubt about this worker
    if isinstance(fact, decided.SpareActivated) and found.worker == fact.replaces:
        return None  # the fact reports the loss of the worker that the spare replaces
    return f"{fact.kind()} of {fact.instance} is caused by {found.kind()} of {found.instance}"


@invariant("before", decided.PolicyAdopted)
def policy_kept(watch: InvariantWatch, event: Recorded, fact: decided.PolicyAdopted) -> str | None:
    """An adopted policy is the same after it was written to the journal and read again.

    The policy must be one with which some controller was started.
    """
    written = codec.decode_body(fact.kind(), codec.encode_body(fact))
    assert isinstance(written, decided.PolicyAdopted)
    known = load(written.policy) in watch.world.scenario.policies
    return None if known else f"decision {fact.number} adopts {written.policy}"


@invariant("before", decided.BreakerOpened | decided.BreakerHalfOpened | decided.DrainStarted)
def within_policy(watch: InvariantWatch, event: Recorded, fact: Decision) -> str | None:
    """Breaker waits, trials and drains end within the limits of the policy."""
    breaker = watch.policy.breaker
    match fact:
        case decided.BreakerOpened():
            wait = fact.retry_at - fact.decided_at
            if not breaker.wait_min <= wait <= breaker.wait_max:
                return f"{fact.instance}'s breaker opens for {wait}"
        case decided.BreakerHalfOpened():
            if not timedelta() < fact.deadline - fact.decided_at <= breaker.trial_timeout:
                return f"{fact.instance}'s trial has a timeout of {fact.deadline - fact.decided_at}"
        case decided.DrainStarted():
            if fact.deadline - fact.decided_at > timedelta(days=1):
                return f"{fact.instance}'s drain has a timeout of {fact.deadline - fact.decided_at}"
    return None


@invariant("before", decided.DegradationChanged)
def all_knobs(watch: InvariantWatch, event: Recorded, fact: decided.DegradationChanged) -> str | None:
    """Every degradation level sets all four knobs to the level's values."""
    level = watch.ledger.levels[fact.model]
    if fact.before != level or fact.after == fact.before:
        return f"{fact.model}: {fact.before} to {fact.after}, from {level}"
    return None if fact.knobs == LADDER[fact.after] else f"level {fact.after} sets {fact.knobs}"


@invariant("before", decided.DegradationChanged)
def hysteresis(watch: InvariantWatch, event: Recorded, fact: decided.DegradationChanged) -> str | None:
    """A degradation level is left only after the dwell and at a sufficient ratio.

    The ratio must reach the entry ratio plus the margin, or the ratio of all provisioned workers if that is lower.
    """
    policy = watch.policy.degradation
    if policy.slo(fact.model) is None:  # the degradation ladder was switched off
        return f"level {fact.after} without an SLO" if fact.after else None
    if fact.after > fact.before:
        entered = fact.ratio < policy.entries[fact.after - 1]
        return None if entered else f"level {fact.after} at ratio {fact.ratio}"
    entry = policy.entries[fact.before - 1]
    if fact.ratio < max(entry, min(entry + policy.margin, _reachable(watch, fact))) - 2e-9:
        return f"level {fact.before} is left at ratio {fact.ratio}"
    ledger = watch.ledger
    since = ledger.level_since.get(fact.model)
    if since is not None and fact.decided_at - since < policy.dwell:
        return f"level {fact.before} is left after {fact.decided_at - since}"
    return None


def _reachable(watch: InvariantWatch, fact: decided.DegradationChanged) -> float:
    """Return the ratio of capacity to SLO that a model would have with all expected workers at full weight."""
    ladder, workers = watch.policy.degradation, watch.shown[-1].workers.values()
    slo = ladder.slo(fact.model)
    serving = [(w.joined.profile, 1.0) for w in workers if w.joined.model == fact.model and w.expected]
    if slo is None or not slo.slo_throughput_rps:
        return 0.0
    full = fleet_capacity(serving, attainable(slo, serving), latency=fact.knobs.latency)
    return full.effective_capacity_rps / slo.slo_throughput_rps


@invariant("before", decided.HealthChanged)
def just_conviction(watch: InvariantWatch, event: Recorded, fact: decided.HealthChanged) -> str | None:
    """A worker is convicted of corruption only if it was corrupt.

    An unconfirmed golden of the worker's own corrupt instance, and a golden of other weights, may convict it too.
    """
    if fact.after is not UNHEALTHY or fact.reason != "token_mismatch":
        return None
    if watch.world.was_corrupt(fact.worker, fact.instance) or _own_past(watch, fact) or _updated(watch, fact):
        return None
    return f"{fact.instance} was never corrupt"


def _updated(watch: InvariantWatch, fact: decided.HealthChanged) -> bool:
    """Return whether the convicting answer is right for weights that the worker has loaded.

    If so, the golden that convicts the worker belongs to other weights.
    """
    machines = watch.world.machines
    machine = machines[fact.worker]
    if all(other.weights.ever == {0} for other in machines.values() if other.model == machine.model):
        return False
    weights = machine.weights
    _, found = watch.ledger.observation(fact.cause)
    if isinstance(found, seen.CanaryFailed):
        canary = int(found.canary[1:])
        return found.got in {machine.right_answer(canary, number) for number in weights.ever}
    fleet = watch.shown[-1]  # an earlier fact convicts it, and this one only triggered the decision
    charges = fleet.workers[fact.worker].health.charges
    goldens = [
        fleet.goldens.get((machine.joined.canary_key, name))
        for name in (*charges.goldens, *charges.own_goldens)
    ]
    return any(
        golden is not None and golden.tokens != machine.right_answer(int(golden.canary[1:]), weights.loaded)
        for golden in goldens
    )


def _own_past(watch: InvariantWatch, fact: decided.HealthChanged) -> bool:
    """Return whether an unconfirmed golden, proposed by a corrupt instance of this worker, convicts it.

    Such a golden convicts every later instance of the worker, because no vote has decided which of the two answers is wrong.
    """
    _, found = watch.ledger.observation(fact.cause)
    if not isinstance(found, seen.CanaryFailed) or found.golden != "provisional":
        return False
    golden = watch.shown[-1].goldens.get((found.canary_key, found.canary))
    if golden is None or golden.proposed_by != fact.worker:
        return False
    return watch.world.was_corrupt(fact.worker, golden.proposed_instance)


@invariant("appended")
def ejection_budget(watch: InvariantWatch, run: Sequence[Recorded]) -> str | None:
    """Suspicion alone takes no more workers of a model out of service than the ejection budget allows."""
    settled, share = watch.reference.settled, watch.policy.budget.max_ejection_share
    for model in watch.world.scenario.models:
        of_model = [worker for worker in settled.workers.values() if worker.joined.model == model]
        counted = sum(worker.counts for worker in of_model)
        out = sum(worker.in_doubt and not worker.routable for worker in of_model)
        if out > share * counted + 1e-9:
            return f"{model}: {out} of {counted} are out of service because of doubt alone"
    return None


@invariant("appended")
def lateness_keeps_one(watch: InvariantWatch, run: Sequence[Recorded]) -> str | None:
    """Lateness alone never takes all workers of a model out of service.

    Lateness means slow answers, or timeouts while the engine still makes progress.
    """
    for model in watch.world.scenario.models:
        entries = [one for one in watch.entries() if one.model == model and not one.forgotten]
        if entries and all(entry.out_by_lateness for entry in entries):
            names = ", ".join(sorted(entry.worker for entry in entries))
            return f"{model}: {names} are out of service, but all of them were only late"
    return None
