"""Defines the kinds of decisions: one frozen dataclass per kind.

A decision carries its consequence (`retry_at`, the new weight, the knobs). So the fleet state that is computed from an old
journal stays the same after the policy has changed.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Literal, TypedDict

from events.fact import Decision
from events.json_types import Json


class HealthStatus(StrEnum):
    """A worker's health. A metric shows a health as its position in the order below: 0 for HEALTHY to 4 for DEAD."""

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
    """What a degradation level changes in the frontends. Every level sets all four values."""

    batch_size: float = 1.0  # factor on the limit of requests in flight per worker
    # requests of this tier and lower tiers are rejected; None: no tier is rejected
    shed_tier: str | None = None
    latency: float = 1.0  # factor on the first-token and queue deadlines, and on the SLO used in the ratio
    accept_new: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDecision(Decision):
    """The base of every decision about one instance of one worker."""

    worker: str  # the worker's stable name
    instance: str  # id of one instance of the worker, from its start to its end


class AboutWorker(TypedDict):
    """The fields that every decision about a worker has."""

    worker: str
    instance: str
    decided_at: datetime
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged(WorkerDecision):
    """A worker's health or its weight changed. A ramp changes only the weight."""

    before: HealthStatus
    after: HealthStatus
    reason: str
    weight: float  # share of the traffic, 0 to 1
    # the weight without the limit that a device fault sets; None: the same as `weight`
    unlimited: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForgotten(WorkerDecision):
    """A worker that left for good was removed from the fleet. From now on only the journal mentions this worker.

    Its conviction, if it had one, is kept for a worker of the same name that joins later.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerOpened(WorkerDecision):
    """This worker gets no request until its trial canary, which is sent at `retry_at`."""

    retry_at: datetime
    wait_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerHalfOpened(WorkerDecision):
    """A canary must now be sent to this worker as its trial. If no result arrives by `deadline`, the trial has failed."""

    deadline: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerClosed(WorkerDecision):
    """This worker passed its trial and gets requests again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted(WorkerDecision):
    """This worker gets no new request. Its running requests may finish until `deadline`."""

    deadline: datetime
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEnded(WorkerDecision):
    """The drain is over.

    The worker has no more requests or has left, the deadline has passed, or an operator resumed the worker.
    """

    outcome: Literal["empty", "deadline", "left", "resumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCapped(WorkerDecision):
    """This doubtful worker stays in service with at most `weight`, because the ejection budget allows no further ejection. A
    weight of None lifts the cap."""

    weight: float | None  # share of the traffic, 0 to 1
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareActivated(WorkerDecision):
    """This spare now serves in place of a failed worker. The failed worker becomes a spare when it returns."""

    replaces: str  # the worker that failed
    reason: str  # why that worker failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareReleased(WorkerDecision):
    """This worker is a spare again, because the worker that it replaced is healthy and serves."""

    returned: str  # the worker that serves again


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenAgreed(Decision):
    """Two instances on different workers gave this canary the same answer, or the answer was configured. From now on a
    deviating answer convicts a worker."""

    canary_key: str
    canary: str
    by: tuple[str, ...]
    tied: tuple[str, ...] = ()  # those workers in `by` that deviate from the golden at a near tie


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRetired(Decision):
    """This golden is no longer used.

    Another answer can become the golden, by the workers' votes or by an operator's approval.
    """

    canary_key: str
    canary: str
    reason: str
    # workers with equal answers that outvoted an agreed golden; the golden no longer convicts them
    outvoted_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradationChanged(Decision):
    """The degradation level of a model changed. `knobs` is what the frontends restrict at the new level."""

    model: str
    before: int  # level, 0 to 4
    after: int  # level, 0 to 4
    ratio: float  # capacity divided by the SLO throughput, at the decision
    knobs: Knobs
    capacity_rps: float
    predicted_rps: float = 0.0  # capacity under the new level; its smaller batches lower throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentOpened(Decision):
    """An incident began with this symptom. Every event that follows from the symptom carries this incident's id."""

    subject: str  # what the incident is about, such as worker:w3 or model:llama
    symptom: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentClosed(Decision):
    """Every worker and model of this incident has recovered, or is gone for good."""

    subject: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAdopted(Decision):
    """From this event on the controller decides by this policy and this version of the deciders."""

    policy: Json
    deciders_version: int  # increased whenever the same facts would lead to another decision
    kinds: tuple[str, ...] | None = None  # fact kinds newer than 0.2.0 that may be written after this event
    allowed_by: str = ""  # operator that allowed the kinds before every process knew them
    command: str = ""  # id of the operator's command that allowed the kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorbed(Decision):
    """No decision was due. This event records how far the controller has read, so that the number of pending events stays
    small."""
