"""Incidents: what belongs together, from the first symptom to recovery or death?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from events.decisions import (
    BreakerOpened,
    Decision,
    DegradationChanged,
    HealthChanged,
    HealthStatus,
    IncidentClosed,
    IncidentOpened,
)
from events.fact import Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentPolicy:
    """What counts as a first symptom."""

    suspicion: bool = True  # a suspicion opens an incident; False: only what takes a worker out of service


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that is wrong and not yet well again."""

    id: str
    subject: str  # worker:w3, model:llama
    symptom: str
    opened_at: datetime
    number: int  # of the decision that opened it
