"""Groups decisions about one worker or model into incidents, from first symptom to recovery or death.

    (none) ── first symptom of a subject ──▶ open ── the subject is healthy again, or gone for good ──▶ closed

An incident belongs to a worker's id, not to one instance: a worker that dies and returns as a new instance is one incident.
The incident's id contains the number of the decision that opened it. Every later decision about the subject carries this id.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from controller.deciders.validation import STRICT
from events import decisions as decided
from events.fact import Decision, Fact
from events.frozen import replace


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentPolicy:
    """Which symptoms open an incident."""

    suspicion: bool = True  # a suspicion opens an incident; False: only an ejection from service does
    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True)
class Incident:
    """An open incident of one worker or model."""

    id: str
    subject: str  # worker:w3, model:llama
    symptom: str
    opened_at: datetime
    cause: str = ""


def evolve(state: Incident | None, fact: Fact) -> Incident | None:
    """Return the incident after one fact; None if the incident is closed or was never opened."""
    if isinstance(fact, decided.IncidentClosed):
        return None
    if not isinstance(fact, decided.IncidentOpened):
        return state
    state = state or Incident(fact.incident, fact.subject, fact.symptom, fact.decided_at, fact.cause)
    return replace(state, subject=fact.subject, symptom=fact.symptom, opened_at=fact.decided_at)


def symptom(policy: IncidentPolicy, decision: Decision) -> tuple[str, str] | None:
    """Return the symptom that a decision shows, as (subject, symptom); None if the decision shows no symptom.

    A requested drain and a joining worker are not symptoms.
    """
    match decision:
        case decided.HealthChanged(after=decided.HealthStatus.UNHEALTHY):
            return f"worker:{decision.worker}", decision.reason
        case decided.HealthChanged(after=decided.HealthStatus.SUSPICIOUS) if policy.suspicion:
            return f"worker:{decision.worker}", decision.reason
        case decided.HealthChanged(after=decided.HealthStatus.DEAD) if not _intended(decision):
            return f"worker:{decision.worker}", decision.reason
        case decided.BreakerOpened():
            return f"worker:{decision.worker}", decision.reason
        case decided.DegradationChanged() if decision.after > decision.before:
            return f"model:{decision.model}", f"capacity at {decision.ratio:.2f} of the SLO"
        case _:
            return None


def _intended(decision: decided.HealthChanged) -> bool:
    """Return whether the death of a worker was requested.

    A worker that ends itself because it cannot continue also becomes DRAINING first, but without a request.
    """
    if decision.reason == "left: self_initiated":
        return False
    return decision.before is decided.HealthStatus.DRAINING or decision.reason == "left: graceful"


def decide(state: Incident, outcome: str, now: datetime, cause: str = "") -> Iterator[Decision]:
    """Yield the decision that closes the incident, if `outcome` (recovered or dead) is not empty."""
    if outcome:
        yield decided.IncidentClosed(
            subject=state.subject, outcome=outcome, incident=state.id, decided_at=now, cause=cause
        )
