"""One worker of the fleet: its current instance, and the state of each of its state machines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from typing import TypeAlias

from controller.deciders import breaker, budget, drain, health
from controller.deciders.breaker import Breaker
from controller.deciders.budget import Budget
from controller.deciders.drain import Drain
from controller.deciders.health_state import CORRUPT, RELAPSE, Health
from events import observations as seen
from events.decisions import HealthStatus
from events.fact import Fact, Recorded
from events.frozen import fast_constructor, replace
from events.intrusion.registration import impossible

RequestOutcome: TypeAlias = (
    seen.RequestsServed | seen.RequestFailed | seen.RequestPoisonous | seen.RequestSuspected
)
CanaryGood: TypeAlias = seen.CanaryPassed | seen.CanarySlow
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
# Reasons of an exit that was not requested.
BY_ITSELF, ENDS_ITSELF = "left: self_initiated", "shutdown: self_initiated"
SPARE = "spare"  # the entry in `Worker.reasons` of a spare
PASSES_MAX = 64  # canaries remembered per worker
CONVICTIONS_KEPT = 16  # per worker, over all of its instances
PAST_MAX = 16  # former instances remembered per worker: a late join of one of them changes nothing


@fast_constructor
@dataclass(frozen=True, slots=True)
class LastCanary:
    """The last canary result of a worker."""

    canary: str
    outcome: str  # passed, slow, failed
    reason: str  # of a failure
    sent_at: datetime
    latency_ms: float
    at: datetime  # journal time of the result


@dataclass(frozen=True, slots=True)
class Conviction:
    """The conviction of one worker instance for a wrong answer to a canary.

    Requests that the instance served after `since` may have wrong answers.
    """

    instance: str
    canary: str
    since: datetime  # send time of this canary's last pass on this worker; without one, when this instance joined
    at: datetime  # journal time of the failure
    seq: int  # stream sequence of the failure


@dataclass(frozen=True, slots=True)
class Spare:
    """The role of one worker: serving, kept as a spare, or serving in place of another worker."""

    kept: bool = False  # kept back: gets no traffic, and is not counted in capacity
    place: str = ""  # the worker that it replaces; empty: none


NO_SPARE = Spare()


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker: its registration, and the state of each of its state machines."""

    joined: seen.WorkerJoined  # as registered, except that `adapters` are those that it has now
    health: Health
    breaker: Breaker
    drain: Drain
    budget: Budget
    last_canary: LastCanary | None = None
    # Canary → send time of its last pass on this worker.
    passes: Mapping[str, datetime] = field(default_factory=dict)
    incident: str = ""  # id of its open incident; empty: none
    past: tuple[str, ...] = ()  # former instances
    joined_at: datetime = LONG_AGO  # by the journal's time
    convictions: tuple[Conviction, ...] = ()  # for wrong answers, of all instances; never removed
    spare: Spare = NO_SPARE  # its role, kept across instances

    @property
    def natural_weight(self) -> float:
        """The routing weight before the ejection budget is applied.

        The weight is 0 for a spare, during a drain, and while the breaker is not closed.
        """
        if self.spare.kept or self.breaker.position != "closed" or self.drain.deadline is not None:
            return 0.0
        return self.health.weight

    @property
    def weight(self) -> float:
        """The worker's routing weight, 0 to 1, where 1 means full traffic. A worker with weight 0 is not routable."""
        natural = self.natural_weight
        if natural == 0.0 and self.budget.kept is not None and (self.counts or self.serves_suspect):
            return self.budget.kept
        return natural

    @property
    def suspect(self) -> bool:
        """Whether only wrong answers to canaries, or a new lineage (reported weights), keep the worker out of service.

        Such a worker may serve if no other worker of its model does.
        """
        h = self.health
        leaves = h.status is HealthStatus.DRAINING or h.exit.draining or h.exit.leaving or self.drain.active
        if not self.alive or leaves or self.spare.kept or h.charges.not_finite:
            return False
        kept_back = h.held or h.corrupt or (h.charges.acquitted and h.convicted)
        return kept_back and all(conviction == CORRUPT for conviction in h.charges.convictions)

    @property
    def serves_suspect(self) -> bool:
        """Whether the worker serves only because no other worker of its model does.

        Such a worker is convicted by canaries, or its lineage (what the engine reports about its weights) is new.
        """
        return self.budget.last and self.suspect and self.natural_weight == 0.0

    @property
    def budgeted(self) -> bool:
        """Whether the ejection budget may have to decide about the worker.

        True if the budget keeps the worker in service, if the worker is `in_doubt`, or if it is a `suspect`.
        """
        return self.budget.kept is not None or self.in_doubt or self.suspect

    @property
    def carries(self) -> float:
        """The share of its capacity that the worker could carry, 0 to 1.

        The ramp of a returning worker lowers its weight, but not this share.
        """
        ramping = self.natural_weight > 0.0 and self.health.status is HealthStatus.HEALTHY
        return self.health.limit if ramping else self.weight

    @property
    def routable(self) -> bool:
        """Whether the worker may get requests."""
        return self.weight > 0.0

    @property
    def expected(self) -> bool:
        """Whether the worker is in service or should be.

        This is false for a worker that is still joining, is a spare, is draining or is dead.
        """
        h = self.health
        gone = h.status is HealthStatus.DEAD or h.status is HealthStatus.DRAINING or h.exit.draining
        return not (gone or h.joining or self.drain.active or self.spare.kept)

    @property
    def counts(self) -> bool:
        """Whether the worker is in service, or would be if there were no suspicion against it.

        This is false for a worker that is not expected to serve, and for a worker that a conviction (silence, fault,
        corruption) excludes.
        """
        return self.expected and not self.health.convicted

    @property
    def in_doubt(self) -> bool:
        """Whether only suspicion keeps the worker out of service.

        Suspicion comes from canaries that failed without confirmation, or from failed requests.
        """
        return self.natural_weight == 0.0 and self.counts

    @property
    def place(self) -> str:
        """The machine that computes the worker's answers.

        This is the address of the server behind the worker. Without such a server, it is the worker's host or, if that is
        unknown, the worker's name.
        """
        return self.joined.server or self.joined.topology.host or self.joined.worker

    @property
    def alive(self) -> bool:
        """Whether the worker's current instance is not DEAD."""
        return self.health.status is not HealthStatus.DEAD

    @property
    def fully_healthy(self) -> bool:
        """Whether the worker is HEALTHY at full weight, with a closed breaker and without a drain.

        The value is false for a worker that the ejection budget keeps in service.
        """
        h = self.health
        full = h.status is HealthStatus.HEALTHY and h.weight >= 1.0 and self.breaker.position == "closed"
        return full and not self.drain.active and self.budget.kept is None

    @property
    def kind(self) -> tuple[str | int, ...]:
        """The worker's model, revision, tokenizer, dtype, TP and DP. Workers of equal kind can replace one another."""
        joined = self.joined
        return joined.model, joined.revision, joined.tokenizer, joined.dtype, joined.tp, joined.dp

    @property
    def lost(self) -> str:
        """Why the worker will not return soon; empty if it serves, may serve soon, or left gracefully."""
        h = self.health
        match h.status:
            case HealthStatus.DEAD:
                drained = h.exit.draining and not h.exit.given_up and h.exit.left != BY_ITSELF
                lost = not drained and h.exit.left != "left: graceful"
            case HealthStatus.DRAINING:
                lost = h.exit.given_up or h.reason == ENDS_ITSELF
            case HealthStatus.UNHEALTHY:
                lost = bool(h.convicted or h.joining or h.trials.failed or h.reason.startswith(RELAPSE))
            case _:
                stopped = h.limits and h.weight == h.limit == 0.0
                return min(h.limits, key=itemgetter(1))[0] if stopped else ""
        return h.reason if lost else ""

    @property
    def last_move(self) -> str:
        """The name of the event that decisions about spares record as their cause.

        This is the last decision about the worker's health or breaker. Without such a decision, it is the last fact that changed
        the worker's health.
        """
        number = max(self.health.moved_by, self.breaker.moved_by)
        return f"decision:{number}" if number else self.health.cause

    @property
    def cache_epoch(self) -> int:
        """The time of the last conviction for a wrong answer, in microseconds since 1970; 0 if there is none.

        An engine can outlive its worker process. Blocks in its cache belong to the epoch in which they were computed, and are
        invalid in a later epoch.
        """
        return round(self.convictions[-1].at.timestamp() * 1e6) if self.convictions else 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the worker gets less than its full share of traffic, as short phrases; empty if it gets the full share."""
        found = []
        h = self.health
        if h.unlimited < 1.0:
            found.append(f"health {h.status.value}: {h.reason}")
        if h.weight < h.unlimited:
            device, weight = min(h.limits, key=itemgetter(1), default=("a device", h.weight))
            found.append(f"{device}: leaves {weight:g}")
        if self.breaker.position != "closed":
            found.append(f"breaker {self.breaker.position}: {self.breaker.why or 'trial'}")
        if self.drain.active:
            found.append(f"draining: {self.drain.reason}")
        if self.serves_suspect:
            found.append("serves as the last worker of its model")
        elif self.budget.kept is not None and self.natural_weight == 0.0:
            found.append("kept by the ejection budget")
        if self.spare.kept:
            found.append(SPARE)
        return tuple(found)


def join(previous: Worker | None, fact: seen.WorkerJoined, cause: str, at: datetime) -> Worker:
    """Return the worker after an instance has joined. A join of the same or a former instance changes nothing.

    The state machines start as for a new worker, except for what `health.rejoin` keeps. The previous instance's canary passes
    are dropped. The open incident, the convictions of all instances and the role as a spare are kept. The role changes only
    if the worker registers with another role than its previous instance.
    """
    name, instance = fact.worker, fact.instance
    if previous is not None and (instance == previous.joined.instance or instance in previous.past):
        return previous
    machines = Breaker(name, instance), Drain(name, instance), Budget(name, instance)
    new = Worker(fact, Health(name, instance, cause=cause), *machines, joined_at=at, spare=Spare(fact.spare))
    if previous is None:
        return new
    new_lineage = seen.is_new_lineage(fact.canary_key, (previous.joined.canary_key,))
    return replace(
        previous,
        joined=fact,
        health=health.rejoin(previous.health, new.health, new_lineage=new_lineage),
        breaker=new.breaker,
        drain=new.drain,
        budget=new.budget,
        last_canary=None,
        passes={},
        past=(*previous.past, previous.joined.instance)[-PAST_MAX:],
        joined_at=at,
        spare=previous.spare if previous.joined.spare == fact.spare else new.spare,
    )


def evolve(state: Worker, fact: Fact, recorded: Recorded, cause: str) -> Worker:
    """Return the worker after one fact about its current instance, applied to each state machine that uses the fact."""
    if isinstance(fact, RequestOutcome):  # the hot path: only the breaker uses these
        moved = breaker.evolve(state.breaker, fact, cause)
        return state if moved is state.breaker else replace(state, breaker=moved)
    if isinstance(fact, seen.CanaryResult):
        return _canary(state, fact, recorded, cause)
    if isinstance(fact, seen.AdaptersChanged):
        return _with_adapters(state, fact)
    return replace(
        state,
        health=health.evolve(state.health, fact, cause),
        breaker=breaker.evolve(state.breaker, fact, cause),
        drain=drain.evolve(state.drain, fact, cause),
        budget=budget.evolve(state.budget, fact, cause),
    )


def _with_adapters(state: Worker, fact: seen.AdaptersChanged) -> Worker:
    """Return the worker with the LoRA adapters that it has now. A list with impossible values changes nothing."""
    if impossible(fact) or fact.adapters == state.joined.adapters:
        return state
    return replace(state, joined=replace(state.joined, adapters=fact.adapters))


def outvoted(state: Worker, canary: str, number: int, *, agrees: bool) -> Worker:
    """Return the worker after decision `number` overruled the golden of `canary`.

    `agrees` tells whether this worker gave the answer that overruled the golden. If the worker is then no longer corrupt, the
    trial of its breaker is due at once.
    """
    moved = health.outvoted(state.health, canary, number, agrees=agrees)
    if moved is state.health:
        return state
    cause = f"decision:{number}"
    tried = state.breaker if moved.corrupt else breaker.try_now(state.breaker, cause)
    return replace(state, health=moved, breaker=tried)


def _canary(state: Worker, fact: seen.CanaryResult, recorded: Recorded, cause: str) -> Worker:
    passes = state.passes
    # With several DP ranks no pass is recorded: a pass of one rank proves nothing about the others.
    if isinstance(fact, CanaryGood) and state.joined.dp <= 1:
        passes = {**passes, fact.canary: fact.sent_at}
        if len(passes) > PASSES_MAX:
            del passes[next(iter(passes))]
    moved = health.evolve(state.health, fact, cause)
    if moved.corrupt and not state.health.corrupt:
        since = passes.get(fact.canary, state.joined_at)
        found = Conviction(fact.instance, fact.canary, since, recorded.at, recorded.seq)
        state = replace(state, convictions=(*state.convictions, found)[-CONVICTIONS_KEPT:])
    outcome, reason = "slow" if isinstance(fact, seen.CanarySlow) else "passed", ""
    if isinstance(fact, seen.CanaryFailed):
        outcome, reason = "failed", fact.reason
    tried = breaker.evolve(state.breaker, fact, cause)
    if state.health.corrupt and not moved.corrupt:
        tried = breaker.try_now(tried, cause)
    return replace(
        state,
        health=moved,
        breaker=tried,
        last_canary=LastCanary(fact.canary, outcome, reason, fact.sent_at, fact.latency_ms, recorded.at),
        passes=passes,
    )


def spare_awaited(lost: Worker, workers: Iterable[Worker]) -> bool:
    """Return whether a spare of the same kind is ready to replace a lost worker, but has not been activated yet."""
    ready = (one for one in workers if one.spare.kept and one.fully_healthy and one.kind == lost.kind)
    return not lost.spare.kept and any(ready)


def replacement(name: str, workers: Iterable[Worker]) -> str:
    """Return the name of the routable worker that replaces worker `name`; empty if there is none."""
    return next((one.joined.worker for one in workers if one.spare.place == name and one.routable), "")
