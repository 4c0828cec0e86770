"""The fleet: every machine wired together. The only decider that knows the others.

`evolve` absorbs one recorded fact; `settle` says everything that is due, stratum by stratum, absorbing each decision
before asking for the next: goldens → health → budget → breaker → drain → degradation → incidents.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from controller.deciders import breaker, budget, degradation, drain, golden, health, incident
from controller.deciders.breaker import Breaker, BreakerPolicy
from controller.deciders.budget import Budget, BudgetPolicy
from controller.deciders.degradation import Degradation, DegradationPolicy
from controller.deciders.drain import Drain, DrainPolicy
from controller.deciders.golden import Golden, GoldenPolicy
from controller.deciders.health import Health, HealthPolicy
from controller.deciders.incident import Incident, IncidentPolicy
from events.decisions import Decision, HealthStatus, WorkerDecision
from events.fact import Fact, Recorded
from events.observations import CanaryFailed, CanaryPassed, CanarySlow, WorkerJoined, WorkerObservation

DECIDERS_VERSION = 1  # grows whenever the same facts would lead to another decision


@dataclass(frozen=True)
class FleetPolicy:
    """Everything that can be set about deciding: the policies of all machines."""

    health: HealthPolicy = HealthPolicy()
    breaker: BreakerPolicy = BreakerPolicy()
    budget: BudgetPolicy = BudgetPolicy()
    drain: DrainPolicy = DrainPolicy()
    degradation: DegradationPolicy = field(default_factory=DegradationPolicy)
    golden: GoldenPolicy = GoldenPolicy()
    incident: IncidentPolicy = IncidentPolicy()


@dataclass(frozen=True, slots=True)
class LastCanary:
    """A worker's last probe."""

    canary: str
    outcome: str  # passed, slow, failed
    reason: str
    sent_at: datetime
    latency_ms: float
    at: datetime  # by the stream's clock


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as the fleet knows it: its current life, and what all machines say about it."""

    joined: WorkerJoined
    health: Health
    breaker: Breaker
    drain: Drain
    budget: Budget
    last_canary: LastCanary | None = None
    passes: Mapping[str, datetime] = field(default_factory=dict)  # canary → when it was last sent and passed
    incident: str = ""  # the open one, if any

    @property
    def weight(self) -> float:
        """The share of traffic that it should get, 0…1: the minimum of all reasons, 0 when it is not routable."""
        natural = self.natural_weight
        if natural == 0.0 and self.budget.kept is not None and self.in_doubt:
            return self.budget.kept
        return natural

    @property
    def natural_weight(self) -> float:
        """The weight but for the ejection budget."""
        if self.breaker.position != "closed" or self.drain.active:
            return 0.0
        return self.health.weight

    @property
    def routable(self) -> bool:
        """Whether requests may go there, as far as the fleet is concerned."""
        return self.weight > 0.0

    @property
    def in_doubt(self) -> bool:
        """Whether doubt alone (failed but unconfirmed canaries, failed requests) keeps it out of service."""
        return self.natural_weight == 0.0 and self.counts

    @property
    def counts(self) -> bool:
        """Whether it is in service, or would be but for doubt: the ejection budget's denominator."""
        h = self.health
        return not (
            h.status in (HealthStatus.DEAD, HealthStatus.DRAINING)
            or h.joining
            or h.draining
            or h.convicted
            or self.drain.active
        )

    @property
    def alive(self) -> bool:
        """Whether this life of it has not ended."""
        return self.health.status is not HealthStatus.DEAD

    @property
    def why(self) -> str:
        """Why it is not at full weight, in a few words; empty if it is."""
        if self.weight >= 1.0:
            return ""
        if self.breaker.position != "closed":
            return f"breaker {self.breaker.position}: {self.breaker.why}"
        return f"{self.health.status.value.lower()}: {self.health.reason}"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything that is known: the fold of the journal."""

    workers: Mapping[str, Worker] = field(default_factory=dict)  # by worker id; the current life only
    goldens: Mapping[tuple[str, str], Golden] = field(default_factory=dict)  # by canary key, canary id
    models: Mapping[str, Degradation] = field(default_factory=dict)  # by model name
    incidents: Mapping[str, Incident] = field(default_factory=dict)  # the open ones, by id
    number: int = 0  # of the last decision
    policy: Mapping[str, Any] | None = None  # as the last leader adopted it
    deciders_version: int = 0


def evolve(fleet: Fleet, recorded: Recorded) -> Fleet:
    """Absorb one recorded fact. Never fails: what says nothing about the fleet, or about another life, falls through."""
    fact = recorded.fact
    cause = f"decision:{fact.number}" if isinstance(fact, Decision) else recorded.id
    if isinstance(fact, Decision):
        fleet = replace(fleet, number=fact.number)
    if isinstance(fact, WorkerJoined):
        return _joined(fleet, fact, cause)
    if isinstance(fact, (WorkerObservation, WorkerDecision)):
        return _about_worker(fleet, fact, recorded, cause)
    return fleet


def _joined(fleet: Fleet, fact: WorkerJoined, cause: str) -> Fleet:
    previous = fleet.workers.get(fact.worker)
    if previous is not None and previous.joined.instance == fact.instance:
        return fleet
    worker = Worker(
        joined=fact,
        health=health.rejoin(previous.health, fact, cause)
        if previous
        else Health(fact.worker, fact.instance, cause=cause),
        breaker=Breaker(fact.worker, fact.instance),
        drain=Drain(fact.worker, fact.instance),
        budget=Budget(fact.worker, fact.instance),
        incident=previous.incident if previous else "",
    )
    return replace(fleet, workers={**fleet.workers, fact.worker: worker})


def _about_worker(
    fleet: Fleet, fact: WorkerObservation | WorkerDecision, recorded: Recorded, cause: str
) -> Fleet:
    worker = fleet.workers.get(fact.worker)
    if worker is None or worker.joined.instance != fact.instance:
        return fleet
    moved = replace(
        worker,
        health=health.evolve(worker.health, fact, cause),
        breaker=breaker.evolve(worker.breaker, fact, cause),
        drain=drain.evolve(worker.drain, fact, cause),
        budget=budget.evolve(worker.budget, fact, cause),
    )
    return replace(fleet, workers={**fleet.workers, fact.worker: moved})


def settle(policy: FleetPolicy, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
    """Return every decision that is due, numbered from `fleet.number + 1`, in the order in which they must be kept."""
    decided: list[Decision] = []
    for _ in range(1000):
        fresh = next(_due(policy, fleet, now), None)
        if fresh is None:
            break
        fresh = replace(fresh, number=fleet.number + 1)
        fleet = evolve(fleet, Recorded(seq=0, at=now, fact=fresh, id=f"decision:{fresh.number}"))
        decided.append(fresh)
    return tuple(decided)


def _due(policy: FleetPolicy, fleet: Fleet, now: datetime):  # type: ignore[no-untyped-def]
    for worker in fleet.workers.values():
        yield from health.decide(policy.health, worker.health, now)
    for worker in fleet.workers.values():
        yield from breaker.decide(policy.breaker, worker.breaker, now)
        yield from drain.decide(policy.drain, worker.drain, now)
