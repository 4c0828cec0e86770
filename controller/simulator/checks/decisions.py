"""Invariants that compare decisions with the check ledger, the policy and a repeated computation.

The check ledger is an independent record of all decisions.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TypeAlias

from controller.deciders.capacity import attainable, fleet_capacity
from controller.deciders.fleet import load
from controller.deciders.health_state import LIMITED
from controller.simulator.checks.watch import Found, InvariantWatch, invariant
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
def decisions_gapless(watch: InvariantWatch, event: Recorded, fact: Decision) -> Found:
    """Decisions are numbered from 1 without gaps."""
    before = watch.ledger.number
    if fact.number != before + 1:
        yield f"decision {fact.number} follows {before}"


@invariant("before")
def one_writer(watch: InvariantWatch, event: Recorded, fact: Decision) -> Found:
    """A controller decides only after it has read every earlier decision.

    Earlier decisions of the same append are exempt, because all decisions of an append are made together.
    """
    broker = watch.world.broker
    if event.through >= broker.decided:
        return
    before = broker.events[broker.decided - 1]
    if (before.source, before.through, before.seq) != (event.source, event.through, event.seq - 1):
        yield f"{event.source} had read up to {event.through}, and {before.source} had decided at {before.seq}"


@invariant("before", decided.WorkerDecision)
def cause_is_real(watch: InvariantWatch, event: Recorded, fact: decided.WorkerDecision) -> Found:
    """A decision's cause precedes the decision, and the deciding controller had read the cause.

    The invariant `own_instance` checks that the cause concerns the same worker instance.
    """
    if fact.cause.startswith("decision:"):
        number = int(fact.cause.removeprefix("decision:"))
        if not 0 < number < fact.number:
            yield f"decision {fact.number} is caused by {fact.cause}"
    elif fact.cause:
        seq, found = watch.ledger.observation(fact.cause)
        if found is None or seq > event.through:
            yield f"{fact.kind()} through {event.through} is caused by {fact.cause}, which lies at {seq or None}"


@invariant("appended")
def batch_is_whole(watch: InvariantWatch, run: Sequence[Recorded]) -> Found:
    """Each append contains exactly the decisions that were due in the fleet state known to its controller."""
    decisions = [e.fact for e in run if isinstance(e.fact, Decision)]
    if isinstance(decisions[0], decided.Absorbed):
        if len(decisions) > 1:
            yield "Absorbed is followed by other decisions in its batch"
        return
    read = watch.shown[run[0].through]
    due = watch.seams.settle(watch.policy, read, decisions[0].decided_at)
    if tuple(decisions) != due:
        yield f"at {run[0].through}, due were {_kinds(due)}, decided were {_kinds(decisions)}"


@invariant("appended")
def quiescence(watch: InvariantWatch, run: Sequence[Recorded]) -> Found:
    """Right after an append of decisions, no further decision is due."""
    last = run[-1].fact
    assert isinstance(last, Decision)
    more = watch.seams.settle(watch.policy, watch.reference.settled, last.decided_at)
    if more:
        yield f"after decision {last.number}, more is due at once: {_kinds(more)}"


def _kinds(decisions: Sequence[Decision]) -> str:
    return "[" + ", ".join(f"{d.number} {d.kind()} {getattr(d, 'instance', '')}" for d in decisions) + "]"


@invariant("before", decided.HealthChanged | BreakerMoved | decided.DrainStarted)
def dead_stays_dead(watch: InvariantWatch, event: Recorded, fact: decided.WorkerDecision) -> Found:
    """No health, breaker or drain decision concerns a dead instance; only a new instance of the worker serves again."""
    if watch.ledger.status_at(fact.instance, event.seq) is DEAD:
        yield f"{fact.kind()} for {fact.instance}, which is dead"


@invariant("before", decided.HealthChanged)
def legal_transition(watch: InvariantWatch, event: Recorded, fact: decided.HealthChanged) -> Found:
    """Each health change is a permitted transition from the current status, and carries a valid weight."""
    entry = watch.ledger.of(fact.worker, fact.instance)
    move = f"{fact.instance}: {fact.before} to {fact.after} ({fact.reason}) at weight {fact.weight}"
    if (fact.before, fact.after) not in LEGAL:
        yield move
    if entry is not None and fact.before is not (was := entry.status or SUSPICIOUS):
        yield f"{move}, but it was {was}"
    top = {HEALTHY: 1.0, SUSPICIOUS: 0.5}.get(fact.after, 0.0)
    limited = fact.after not in OUT and (fact.reason == LIMITED or fact.unlimited is not None)
    fits = 0 <= fact.weight <= top and (fact.weight > 0 or fact.after is not HEALTHY)
    if not (limited or fits):
        yield move


@invariant("before", decided.HealthChanged)
def limits_obeyed(watch: InvariantWatch, event: Recorded, fact: decided.HealthChanged) -> Found:
    """No decision sets a worker's weight above the device limits that the deciding controller had read."""
    entry = watch.ledger.of(fact.worker, fact.instance)
    left = entry.limit(event.through) if entry is not None else 1.0
    if fact.weight > left:
        yield f"{fact.instance} has weight {fact.weight}, its devices allow {left}"


@invariant("before", BreakerMoved)
def breaker_moves(watch: InvariantWatch, event: Recorded, fact: decided.WorkerDecision) -> Found:
    """A breaker goes from closed to open, from open to half-open, and from half-open to open or closed."""
    entry = watch.ledger.of(fact.worker, fact.instance)
    if entry is not None and entry.position not in BREAKER_FROM[type(fact)]:
        yield f"{fact.kind()} of {fact.instance}, but its breaker was {entry.position}"


@invariant("before", decided.BreakerOpened | decided.BreakerClosed)
def no_straggler(watch: InvariantWatch, event: Recorded, fact: decided.WorkerDecision) -> Found:
    """A canary or request that was sent before a breaker's last transition does not open or close the breaker."""
    entry = watch.ledger.of(fact.worker, fact.instance)
    match watch.ledger.observation(fact.cause)[1]:
        case (
            seen.CanaryResult(sent_under=under)
            | seen.RequestFailed(routed_under=under)
            | seen.RequestsServed(routed_under=under)
        ) if entry is not None and under is not None and under < entry.moved_by:
            yield f"{fact.kind()} of {fact.instance} by an outcome sent under {under}, last moved by {entry.moved_by}"


@invariant("before", decided.BreakerOpened)
def in_a_row(watch: InvariantWatch, event: Recorded, fact: decided.BreakerOpened) -> Found:
    """Failed canaries or requests open a breaker only after `failures_max` consecutive failures.

    A success resets the count. Facts that the controller had not read do not count, and a repeated fact counts once.
    """
    entry, least = watch.ledger.of(fact.worker, fact.instance), watch.policy.breaker.failures_max
    if entry is None or fact.reason.startswith(("unhealthy", "trial_failed")):
        return
    if fact.reason.startswith("requests"):
        counted = [n for seq, under, n in entry.failures if seq <= event.through and under >= entry.moved_by]
        if max(counted, default=0) < least:
            yield f"{fact.instance}: {fact.reason}, counted {counted}"
    else:
        known = [bad for seq, under, bad in entry.results if seq <= event.through and under >= entry.moved_by]
        if len(known) < least or not all(known[-least:]):
            yield f"{fact.instance}: {fact.reason}, {known[-9:]}"


@invariant("before", decided.WorkerDecision)
def own_instance(watch: InvariantWatch, event: Recorded, fact: decided.WorkerDecision) -> Found:
    """A fact about one worker instance causes no decision about another instance.

    Two facts are exempt: a vote on a golden can change another worker's health, and the loss of a worker activates a spare.
    """
    _, found = watch.ledger.observation(fact.cause)
    if found is None or (found.worker, found.instance) == (fact.worker, fact.instance):
        return
    # Goldens are voted on, so another worker's answer can raise or remove doubt about this worker.
    voted = (
        found.worker != fact.worker and isinstance(fact, decided.HealthChanged) and isinstance(found, VOTES)
    )
    # The fact reports the loss of the worker that the spare replaces.
    lost = isinstance(fact, decided.SpareActivated) and found.worker == fact.replaces
    if not (voted or lost):
        yield f"{fact.kind()} of {fact.instance} is caused by {found.kind()} of {found.instance}"


@invariant("before", decided.PolicyAdopted)
def policy_kept(watch: InvariantWatch, event: Recorded, fact: decided.PolicyAdopted) -> Found:
    """An adopted policy is the same after it was written to the journal and read again.

    The check also requires that a controller of this run was configured with the policy.
    """
    written = codec.decode_body(fact.kind(), codec.encode_body(fact))
    assert isinstance(written, decided.PolicyAdopted)
    if load(written.policy) not in watch.world.scenario.policies:
        yield f"decision {fact.number} adopts {written.policy}"


@invariant("before", decided.BreakerOpened | decided.BreakerHalfOpened | decided.DrainStarted)
def within_policy(watch: InvariantWatch, event: Recorded, fact: Decision) -> Found:
    """Breaker waits and trials keep the policy's time limits, and no drain is given more than a day."""
    breaker = watch.policy.breaker
    match fact:
        case decided.BreakerOpened():
            wait = fact.retry_at - fact.decided_at
            if not breaker.wait_min <= wait <= breaker.wait_max:
                yield f"{fact.instance}'s breaker opens for {wait}"
        case decided.BreakerHalfOpened():
            if not timedelta() < fact.deadline - fact.decided_at <= breaker.trial_timeout:
                yield f"{fact.instance}'s trial has a timeout of {fact.deadline - fact.decided_at}"
        case decided.DrainStarted():
            if fact.deadline - fact.decided_at > timedelta(days=1):
                yield f"{fact.instance}'s drain has a timeout of {fact.deadline - fact.decided_at}"


@invariant("before", decided.DegradationChanged)
def all_knobs(watch: InvariantWatch, event: Recorded, fact: decided.DegradationChanged) -> Found:
    """Each change of a degradation level sets all knobs as the new level requires.

    The knobs are batch size, shed tier, accepted latency and admission.
    """
    level = watch.ledger.levels[fact.model]
    if fact.before != level or fact.after == fact.before:
        yield f"{fact.model}: {fact.before} to {fact.after}, from {level}"
    elif fact.knobs != LADDER[fact.after]:
        yield f"level {fact.after} sets {fact.knobs}"


@invariant("before", decided.DegradationChanged)
def hysteresis(watch: InvariantWatch, event: Recorded, fact: decided.DegradationChanged) -> Found:
    """A degradation level rises only if capacity is low, and falls only if capacity suffices and time has passed.

    The capacity ratio is a model's capacity divided by its SLO's throughput. A level is entered only below the level's entry
    ratio. A level is left only after the policy's `dwell`, and only if the capacity ratio has reached an exit ratio. The exit
    ratio is the entry ratio plus the policy's margin. If all provisioned workers together cannot reach this sum, the exit
    ratio is the ratio that they can reach, but at least the entry ratio.
    """
    policy = watch.policy.degradation
    if policy.slo(fact.model) is None:  # the degradation ladder was switched off
        if fact.after:
            yield f"level {fact.after} without an SLO"
        return
    if fact.after > fact.before:
        if fact.ratio >= policy.entries[fact.after - 1]:
            yield f"level {fact.after} at ratio {fact.ratio}"
        return
    entry = policy.entries[fact.before - 1]
    if fact.ratio < max(entry, min(entry + policy.margin, _reachable(watch, fact))) - 2e-9:
        yield f"level {fact.before} is left at ratio {fact.ratio}"
    ledger = watch.ledger
    since = ledger.level_since.get(fact.model)
    if since is not None and fact.decided_at - since < policy.dwell:
        yield f"level {fact.before} is left after {fact.decided_at - since}"


def _reachable(watch: InvariantWatch, fact: decided.DegradationChanged) -> float:
    """Return the capacity ratio that a model would have if every worker that should serve had full weight.

    The capacity ratio is the capacity divided by the SLO's throughput. Without an SLO, the result is 0.
    """
    ladder, workers = watch.policy.degradation, watch.shown[-1].workers.values()
    slo = ladder.slo(fact.model)
    serving = [(w.joined.profile, 1.0) for w in workers if w.joined.model == fact.model and w.expected]
    if slo is None or not slo.slo_throughput_rps:
        return 0.0
    full = fleet_capacity(serving, attainable(slo, serving), latency=fact.knobs.latency)
    return full.effective_capacity_rps / slo.slo_throughput_rps


@invariant("before", decided.HealthChanged)
def just_conviction(watch: InvariantWatch, event: Recorded, fact: decided.HealthChanged) -> Found:
    """A worker is convicted of corruption only if it was corrupt.

    A golden is the stored right answer to a canary. Two kinds of goldens may convict a worker that was never corrupt. The
    first kind was proposed by a corrupt earlier instance of the same worker, and no other worker has confirmed it. The second
    kind was recorded with other weights than those of the worker.
    """
    if fact.after is not UNHEALTHY or fact.reason != "token_mismatch":
        return
    corrupt = watch.world.was_corrupt(fact.worker, fact.instance)
    if not (corrupt or _own_past(watch, fact) or _updated(watch, fact)):
        yield f"{fact.instance} was never corrupt"


def _updated(watch: InvariantWatch, fact: decided.HealthChanged) -> bool:
    """Return whether the golden that convicted a worker was recorded with other weights than the worker's.

    A golden is the stored right answer to a canary. The result is False if the model's weights have never been updated.
    Otherwise the decision's cause determines the result:

    - A failed canary: whether the worker's answer is right for any weights that the worker has ever loaded.
    - Any other fact: whether a golden that convicts the worker differs from the right answer for the worker's present weights.
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
    charges, key = fleet.workers[fact.worker].health.charges, machine.joined.canary_key
    known = (fleet.goldens.get((key, name)) for name in (*charges.goldens, *charges.own_goldens))
    goldens = [golden for golden in known if golden is not None]
    return any(one.tokens != machine.right_answer(int(one.canary[1:]), weights.loaded) for one in goldens)


def _own_past(watch: InvariantWatch, fact: decided.HealthChanged) -> bool:
    """Return whether an unconfirmed golden, proposed by a corrupt instance of this worker, convicts the worker.

    Such a golden convicts every later instance of the worker, until another worker has confirmed either the golden or the
    answer of the later instance.
    """
    _, found = watch.ledger.observation(fact.cause)
    if not isinstance(found, seen.CanaryFailed) or found.golden != "provisional":
        return False
    golden = watch.shown[-1].goldens.get((found.canary_key, found.canary))
    if golden is None or golden.proposed_by != fact.worker:
        return False
    return watch.world.was_corrupt(fact.worker, golden.proposed_instance)


@invariant("appended")
def ejection_budget(watch: InvariantWatch, run: Sequence[Recorded]) -> Found:
    """Suspicion alone takes no more workers of a model out of service than the ejection budget allows."""
    settled, share = watch.reference.settled, watch.policy.budget.max_ejection_share
    for model in watch.world.scenario.models:
        of_model = [worker for worker in settled.workers.values() if worker.joined.model == model]
        counted = sum(worker.counts for worker in of_model)
        out = sum(worker.in_doubt and not worker.routable for worker in of_model)
        if out > share * counted + 1e-9:
            yield f"{model}: {out} of {counted} are out of service because of doubt alone"


@invariant("appended")
def lateness_keeps_one(watch: InvariantWatch, run: Sequence[Recorded]) -> Found:
    """Lateness alone never takes all workers of a model out of service.

    Lateness means slow answers, or timeouts while the engine still makes progress.
    """
    for model in watch.world.scenario.models:
        entries = [one for one in watch.entries if one.model == model and not one.forgotten]
        if entries and all(entry.out_by_lateness for entry in entries):
            names = ", ".join(sorted(entry.worker for entry in entries))
            yield f"{model}: {names} are out of service, but all of them were only late"
