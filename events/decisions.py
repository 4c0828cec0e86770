"""What the controller can decide. One frozen dataclass per kind.

A decision carries its consequence (`retry_at`, the new weight, the knobs), so an old journal folds to the old state
after the policy has changed.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from events.fact import Decision


class HealthStatus(StrEnum):
    """A worker's health. The order is the seed's metric value: 0 healthy … 4 dead."""

    HEALTHY = "HEALTHY"
    SUSPICIOUS = "SUSPICIOUS"
    UNHEALTHY = "UNHEALTHY"
    DRAINING = "DRAINING"
    DEAD = "DEAD"

    @property
    def metric(self) -> int:
        return list(HealthStatus).index(self)


BreakerPosition = Literal["closed", "open", "half_open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What a degradation level means for a frontend. Every level sets all four."""

    batch_size: float = 1.0  # multiplies the in-flight cap per worker
    shed_tier: str | None = None  # requests of this tier and below are rejected
    latency: float = 1.0  # multiplies first-token and queue deadlines, and the SLO used in the ratio
    accept_new: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDecision(Decision):
    """The base of every decision about one instance of one worker."""

    worker: str  # the stable name of a place that runs an engine
    instance: str  # one life of it


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged(WorkerDecision):
    """A worker's health or its weight moved (a ramp moves only the weight)."""

    before: HealthStatus
    after: HealthStatus
    reason: str
    weight: float  # share of the traffic, 0 to 1
    unlimited: float | None = None  # the weight that it would have if no device limited it; None: this one


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForgotten(WorkerDecision):
    """A worker that left for good is no part of the fleet any more: only the journal tells of it.

    What convicted it is kept, for one of its name that joins later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerOpened(WorkerDecision):
    """No request to this worker until its trial, which comes due at `retry_at`."""

    retry_at: datetime
    wait_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerHalfOpened(WorkerDecision):
    """One canary, the trial, is due; no result by `deadline` is a failure."""

    deadline: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerClosed(WorkerDecision):
    """The trial passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted(WorkerDecision):
    """No new request for this worker; what runs may finish until `deadline`."""

    deadline: datetime
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEnded(WorkerDecision):
    """The drain is over: the worker is empty, or its time was up, or it was resumed."""

    outcome: Literal["empty", "deadline", "left", "resumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCapped(WorkerDecision):
    """The ejection budget kept this doubtful worker in service at `weight`; None lifts the cap."""

    weight: float | None  # share of the traffic, 0 to 1
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareActivated(WorkerDecision):
    """This spare serves from now on, in the place of a worker that is lost. That one is a spare when it comes back."""

    replaces: str  # the worker that is lost
    reason: str  # why it is


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareReleased(WorkerDecision):
    """This worker is a spare again: the one in whose place it served is well, and serves."""

    returned: str  # the worker that has its place again


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenAgreed(Decision):
    """Two instances on different workers gave this answer (or it was configured): from now on it convicts."""

    canary_key: str
    canary: str
    by: tuple[str, ...]
    tied: tuple[str, ...] = ()  # of these: workers whose answer parts from the golden at a near tie


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRetired(Decision):
    """This golden no longer counts; the next answers are voted on again."""

    canary_key: str
    canary: str
    reason: str
    outvoted_by: tuple[
        str, ...
    ] = ()  # workers whose equal answers outvoted an agreed golden: it convicts them no more


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradationChanged(Decision):
    """A model's degradation level moved."""

    model: str
    before: int  # level, 0 to 4
    after: int  # level, 0 to 4
    ratio: float  # capacity / SLO throughput when it was decided
    knobs: Knobs
    capacity_rps: float
    predicted_rps: float = 0.0  # what the level itself leaves of that: its cut batch lowers throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentOpened(Decision):
    """Something began to go wrong. Everything that follows from it carries this incident's id."""

    subject: str  # worker:w3, model:llama
    symptom: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentClosed(Decision):
    """All that belonged to this incident is well again, or gone for good."""

    subject: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAdopted(Decision):
    """From here on the controller decides by this policy and this version of the deciders."""

    policy: dict[str, Any]
    deciders_version: int  # grows whenever the same facts would lead to another decision
    kinds: tuple[str, ...] | None = None  # kinds beyond those of 0.2.0 that may be written from here on
    allowed_by: str = ""  # the operator who allowed them while a process did not know them
    command: str = ""  # id of that operator's command


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorbed(Decision):
    """Nothing was due: this only says how far the controller has read, so that pending stays small."""
