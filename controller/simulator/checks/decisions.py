"""Checks of what was decided: against the ledger, against the policy, and by deciding again."""

from collections.abc import Sequence
from datetime import timedelta

from controller.deciders.capacity import attainable, fleet_capacity
from controller.deciders.fleet import load
from controller.deciders.health_state import LIMITED
from controller.simulator.checks.ledger import LedgerEntry
from controller.simulator.checks.watch import InvariantWatch
from events import codec
from events.decisions import (
    Absorbed,
    BreakerClosed,
    BreakerHalfOpened,
    BreakerOpened,
    DegradationChanged,
    DrainStarted,
    HealthChanged,
    HealthStatus,
    Knobs,
    PolicyAdopted,
    SpareActivated,
    WorkerDecision,
)
from events.fact import Decision, Recorded
from events.observations import (
    CanaryFailed,
    CanaryPassed,
    CanaryResult,
    CanarySlow,
    GoldenDisputed,
    GoldenProposed,
    RequestFailed,
    RequestsServed,
    WorkerJoined,
    WorkerObservation,
)

HEALTHY, SUSPICIOUS, UNHEALTHY, DRAINING, DEAD = HealthStatus
LEGAL = {
    (SUSPICIOUS, HEALTHY), (SUSPICIOUS, SUSPICIOUS), (SUSPICIOUS, UNHEALTHY), (SUSPICIOUS, DRAINING), (SUSPICIOUS, DEAD),
    (HEALTHY, HEALTHY), (HEALTHY, SUSPICIOUS), (HEALTHY, UNHEALTHY), (HEALTHY, DRAINING), (HEALTHY, DEAD),
    (UNHEALTHY, HEALTHY), (UNHEALTHY, UNHEALTHY), (UNHEALTHY, DRAINING), (UNHEALTHY, DEAD),
    (DRAINING, HEALTHY), (DRAINING, UNHEALTHY), (DRAINING, DRAINING), (DRAINING, DEAD),
}  # fmt: skip
BREAKER_FROM = {
    BreakerOpened: ("closed", "half_open"),
    BreakerHalfOpened: ("open",),
    BreakerClosed: ("half_open",),
}
# The ladder as the design seed gives it. It leaves three of level 4's knobs open: they are those of level 3.
LADDER = (
    Knobs(),
    Knobs(batch_size=0.75),
    Knobs(batch_size=0.75, shed_tier="best_effort"),
    Knobs(batch_size=0.5, shed_tier="best_effort", latency=2.0),
    Knobs(batch_size=0.5, shed_tier="best_effort", latency=2.0, accept_new=False),
)
VOTES = (GoldenProposed, GoldenDisputed, CanaryPassed, CanarySlow, WorkerJoined)


def gapless(watch: InvariantWatch, event: Recorded) -> str | None:
    """Compare a decision's number with the one before."""
    if isinstance(event.fact, Decision) and event.fact.number != watch.ledger.number + 1:
        return f"decision {event.fact.number} follows {watch.ledger.number}"
    return None


def one_writer(watch: InvariantWatch, event: Recorded) -> str | None:
    """Look whether whoever decided had read the decision before, or appended both together."""
    before = watch.decided
    if not isinstance(event.fact, Decision) or before is None:
        return None
    together = (
        before.source == event.source and before.through == event.through and before.seq == event.seq - 1
    )
    if not together and event.through < before.seq:
        return (
            f"{event.source} had read up to {event.through}, and {before.source} had decided at {before.seq}"
        )
    return None


def cause(watch: InvariantWatch, event: Recorded) -> str | None:
    """Look for a decision's cause among what its controller had read."""
    fact = event.fact
    if not isinstance(fact, WorkerDecision) or not fact.cause:
        return None
    if fact.cause.startswith("decision:"):
        number = int(fact.cause.removeprefix("decision:"))
        return None if 0 < number < fact.number else f"decision {fact.number} is caused by {fact.cause}"
    found = watch.ledger.observation(fact.cause)
    if found is None or found[0] > event.through:
        return f"{fact.kind()} through {event.through} is caused by {fact.cause}, which lies at {found and found[0]}"
    return None


def own_life(watch: InvariantWatch, event: Recorded) -> str | None:
    """Compare whom a decision is about with whom its cause is about."""
    fact = event.fact
    if not isinstance(fact, WorkerDecision):
        return None
    found = watch.ledger.observation(fact.cause)
    if found is None or (found[1].worker, found[1].instance) == (fact.worker, fact.instance):
        return None
    if found[1].worker != fact.worker and isinstance(fact, HealthChanged) and isinstance(found[1], VOTES):
        return None  # goldens are voted on: another worker's answer can raise or end a doubt
    if isinstance(fact, SpareActivated) and found[1].worker == fact.replaces:
        return None  # a spare takes the place of a worker that is lost by this fact
    return f"{fact.kind()} of {fact.instance} is caused by {found[1].kind()} of {found[1].instance}"


def whole(watch: InvariantWatch, run: Sequence[Recorded]) -> str | None:
    """Decide again from what had been read, and compare with the whole append."""
    decisions = [e.fact for e in run if isinstance(e.fact, Decision)]
    if isinstance(decisions[0], Absorbed):
        return None if len(decisions) == 1 else "Absorbed is followed by others in its batch"
    read = watch.shown[run[0].through]
    due = watch.seams.settle(watch.policy, read, decisions[0].decided_at)
    if tuple(decisions) != due:
        return f"at {run[0].through} was due {_kinds(due)}, decided was {_kinds(decisions)}"
    return None


def quiescent(watch: InvariantWatch, run: Sequence[Recorded]) -> str | None:
    """Decide again right after an append."""
    last = run[-1].fact
    assert isinstance(last, Decision)
    more = watch.seams.settle(watch.policy, watch.reference.settled, last.decided_at)
    return f"after decision {last.number} is due at once: {_kinds(more)}" if more else None


def _kinds(decisions: Sequence[Decision]) -> str:
    return "[" + ", ".join(f"{d.number} {d.kind()} {getattr(d, 'instance', '')}" for d in decisions) + "]"


def dead(watch: InvariantWatch, event: Recorded) -> str | None:
    """Look whether a decision is about an instance that is dead."""
    fact = event.fact
    if not isinstance(fact, HealthChanged | BreakerOpened | BreakerHalfOpened | BreakerClosed | DrainStarted):
        return None
    return f"{fact.kind()} for {fact.instance}, which is dead" if fact.instance in watch.ledger.dead else None


def transition(watch: InvariantWatch, event: Recorded) -> str | None:
    """Compare a move of health with the table, with the ledger, and with the weights of the status."""
    fact = event.fact
    if not isinstance(fact, HealthChanged):
        return None
    entry = watch.ledger.of(fact.worker, fact.instance)
    was = SUSPICIOUS if entry is None or entry.status is None else entry.status
    move = f"{fact.instance}: {fact.before} to {fact.after} ({fact.reason}) at weight {fact.weight}"
    if (fact.before, fact.after) not in LEGAL:
        return move
    if entry is not None and fact.before is not was:
        return f"{move}, but it was {was}"
    if fact.after in (UNHEALTHY, DRAINING, DEAD):
        return move if fact.weight else None
    top = 1.0 if fact.after is HEALTHY else 0.5
    limited = fact.reason == LIMITED or fact.unlimited is not None
    return (
        None
        if limited or 0 < fact.weight <= top or (fact.after is SUSPICIOUS and fact.weight <= top)
        else move
    )


def limit(watch: InvariantWatch, event: Recorded) -> str | None:
    """Compare a weight with what the devices leave, as far as the controller had read."""
    fact = event.fact
    entry = watch.ledger.of(fact.worker, fact.instance) if isinstance(fact, HealthChanged) else None
    if entry is None or not isinstance(fact, HealthChanged):
        return None
    left = entry.limit(event.through)
    return f"{fact.instance} gets {fact.weight}, its devices leave it {left}" if fact.weight > left else None


def breaker(watch: InvariantWatch, event: Recorded) -> str | None:
    """Compare a move of a breaker with its position in the ledger."""
    fact = event.fact
    if not isinstance(fact, BreakerOpened | BreakerHalfOpened | BreakerClosed):
        return None
    entry = watch.ledger.of(fact.worker, fact.instance)
    if entry is not None and entry.position not in BREAKER_FROM[type(fact)]:
        return f"{fact.kind()} of {fact.instance}, whose breaker was {entry.position}"
    return None


def straggler(watch: InvariantWatch, event: Recorded) -> str | None:
    """Look whether an outcome that moved a breaker was sent before its last move."""
    fact = event.fact
    if not isinstance(fact, BreakerOpened | BreakerClosed):
        return None
    entry, found = watch.ledger.of(fact.worker, fact.instance), watch.ledger.observation(fact.cause)
    if entry is None or found is None:
        return None
    sent_under = _sent_under(found[1])
    if sent_under is not None and sent_under < entry.moved_by:
        return f"{fact.kind()} of {fact.instance} by an outcome sent under {sent_under}, moved last by {entry.moved_by}"
    return None


def in_a_row(watch: InvariantWatch, event: Recorded) -> str | None:
    """Count naively, over what the controller had read: a repetition of a fact is one fact."""
    fact = event.fact
    if not isinstance(fact, BreakerOpened) or fact.reason.startswith(("unhealthy", "trial_failed")):
        return None
    entry, least = watch.ledger.of(fact.worker, fact.instance), watch.policy.breaker.failures_max
    if entry is None:
        return None
    if fact.reason.startswith("requests"):
        counted = [n for seq, under, n in entry.failures if seq <= event.through and under >= entry.moved_by]
        return (
            None
            if counted and max(counted) >= least
            else f"{fact.instance}: {fact.reason}, counted {counted}"
        )
    known = [
        failed for seq, under, failed in entry.results if seq <= event.through and under >= entry.moved_by
    ]
    return (
        None
        if all(known[-least:]) and len(known) >= least
        else f"{fact.instance}: {fact.reason}, {known[-9:]}"
    )


def _sent_under(fact: WorkerObservation) -> int | None:
    if isinstance(fact, CanaryResult):
        return fact.sent_under
    return fact.routed_under if isinstance(fact, RequestFailed | RequestsServed) else None


def bounded(watch: InvariantWatch, event: Recorded) -> str | None:
    """Compare a wait, a trial and a drain with the longest that the policy in force allows."""
    fact, policy = event.fact, watch.policy
    match fact:
        case BreakerOpened():
            wait = fact.retry_at - fact.decided_at
            if not policy.breaker.wait_min <= wait <= policy.breaker.wait_max:
                return f"{fact.instance}'s breaker opens for {wait}"
        case BreakerHalfOpened():
            if not timedelta() < fact.deadline - fact.decided_at <= policy.breaker.trial_timeout:
                return f"{fact.instance}'s trial may take {fact.deadline - fact.decided_at}"
        case DrainStarted():
            if fact.deadline - fact.decided_at > timedelta(days=1):
                return f"{fact.instance}'s drain may take {fact.deadline - fact.decided_at}"
    return None


def policy(watch: InvariantWatch, event: Recorded) -> str | None:
    """The policy that the journal keeps, read back, must be one that a controller was started with."""
    fact = event.fact
    if not isinstance(fact, PolicyAdopted):
        return None
    written = codec.decode_body(fact.kind(), codec.encode_body(fact))
    assert isinstance(written, PolicyAdopted)
    known = load(written.policy) in watch.world.scenario.policies
    return None if known else f"decision {fact.number} adopts {written.policy}"


def knobs(watch: InvariantWatch, event: Recorded) -> str | None:
    """Compare a level and its knobs with the ladder."""
    fact = event.fact
    if not isinstance(fact, DegradationChanged):
        return None
    if fact.before != watch.level(fact.model) or fact.after == fact.before:
        return f"{fact.model}: {fact.before} to {fact.after}, from {watch.level(fact.model)}"
    return None if fact.knobs == LADDER[fact.after] else f"level {fact.after} sets {fact.knobs}"


def hysteresis(watch: InvariantWatch, event: Recorded) -> str | None:
    """Compare a change of level with its entry, the margin and the dwell."""
    fact, policy = event.fact, watch.policy.degradation
    if not isinstance(fact, DegradationChanged):
        return None
    if policy.slo(fact.model) is None:  # the ladder was switched off
        return f"level {fact.after} without an SLO" if fact.after else None
    if fact.after > fact.before:
        return (
            None
            if fact.ratio < policy.entries[fact.after - 1]
            else f"level {fact.after} at ratio {fact.ratio}"
        )
    entry = policy.entries[fact.before - 1]
    if fact.ratio < max(entry, min(entry + policy.margin, _reachable(watch, fact))) - 2e-9:
        return f"level {fact.before} is left at ratio {fact.ratio}"
    since = watch.ledger.taken_at(fact.model)
    if since is not None and fact.decided_at - since < policy.dwell:
        return f"level {fact.before} is left after {fact.decided_at - since}"
    return None


def _reachable(watch: InvariantWatch, fact: DegradationChanged) -> float:
    """Return the ratio of a model's capacity to its objective if all workers that should serve had full weight."""
    ladder, workers = watch.policy.degradation, watch.shown[-1].workers.values()
    slo = ladder.slo(fact.model)
    mine = [(w.joined.profile, 1.0) for w in workers if w.joined.model == fact.model and w.expected]
    if slo is None or not slo.slo_throughput_rps:
        return 0.0
    full = fleet_capacity(mine, attainable(slo, mine), latency=fact.knobs.latency)
    return full.effective_capacity_rps / slo.slo_throughput_rps


def just(watch: InvariantWatch, event: Recorded) -> str | None:
    """Look whether a worker that was convicted of wrong tokens ever was corrupt, or is held to what it said when it was."""
    fact = event.fact
    if not isinstance(fact, HealthChanged) or fact.after is not UNHEALTHY or fact.reason != "token_mismatch":
        return None
    if watch.world.was_corrupt(fact.worker, fact.instance) or _own_past(watch, fact) or _updated(watch, fact):
        return None
    return f"{fact.instance} was never corrupt"


def _updated(watch: InvariantWatch, fact: HealthChanged) -> bool:
    """Whether what convicts it is the right answer of weights that it has or had: the golden is of other weights."""
    machines = watch.world.machines
    machine = machines[fact.worker]
    if all(other.standing.weights.ever == {0} for other in machines.values() if other.model == machine.model):
        return False
    weights = machine.standing.weights
    found = watch.ledger.observation(fact.cause)
    if found is not None and isinstance(found[1], CanaryFailed):
        canary = int(found[1].canary[1:])
        return found[1].got in {machine.right_answer(canary, mine) for mine in weights.ever}
    fleet = watch.shown[-1]  # an earlier fact convicts it, and this one only brought the decision about
    charges = fleet.workers[fact.worker].health.charges
    goldens = [
        fleet.goldens.get((machine.joined.canary_key, name))
        for name in (*charges.goldens, *charges.own_goldens)
    ]
    return any(
        golden is not None and golden.tokens != machine.right_answer(int(golden.canary[1:]), weights.loaded)
        for golden in goldens
    )


def _own_past(watch: InvariantWatch, fact: HealthChanged) -> bool:
    """Whether what convicts it is a golden that a corrupt life of this worker has given, and nobody has confirmed: such a golden
    convicts every life of it, for nobody has said which of the two is wrong."""
    found = watch.ledger.observation(fact.cause)
    if found is None or not isinstance(found[1], CanaryFailed) or found[1].golden != "provisional":
        return False
    golden = watch.shown[-1].goldens.get((found[1].canary_key, found[1].canary))
    if golden is None or golden.proposed_by != fact.worker:
        return False
    return watch.world.was_corrupt(fact.worker, golden.proposed_instance)


def budget(watch: InvariantWatch, run: Sequence[Recorded]) -> str | None:
    """Count, by model, how many are out of service for doubt alone."""
    settled, share = watch.reference.settled, watch.policy.budget.max_ejection_share
    counted: dict[str, int] = {}
    ejected: dict[str, int] = {}
    for worker in settled.workers.values():
        model = worker.joined.model
        counted[model] = counted.get(model, 0) + worker.counts
        ejected[model] = ejected.get(model, 0) + (worker.in_doubt and not worker.routable)
    for model, out in ejected.items():
        if out > share * counted[model] + 1e-9:
            return f"{model}: {out} of {counted[model]} are out of service for doubt alone"
    return None


def lateness(watch: InvariantWatch, run: Sequence[Recorded]) -> str | None:
    """Look for a model of which no worker serves, and nothing but lateness spoke against each."""
    by_model: dict[str, list[LedgerEntry]] = {}
    for entry in watch.entries():
        if not entry.forgotten:
            by_model.setdefault(entry.model, []).append(entry)
    for model, entries in by_model.items():
        if all(entry.out_by_lateness for entry in entries):
            names = ", ".join(sorted(entry.worker for entry in entries))
            return f"{model}: {names} are out of service, and none did more than answer late"
    return None
