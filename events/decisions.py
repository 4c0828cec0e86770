"""The kinds of decisions: one frozen dataclass per kind.

A decision carries its consequence (`retry_at`, the new weight, the knobs), so that an old journal folds to the old state
after the policy has changed.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Literal

from events.fact import Decision
from events.json_types import Json


class HealthStatus(StrEnum):
    """A worker's health. The order gives the metric's value: 0 healthy … 4 dead."""

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
    """The settings of a degradation level for frontends. Every level sets all four."""

    batch_size: float = 1.0  # factor of the in-flight cap per worker
    shed_tier: str | None = None  # requests of this tier and below are rejected
    latency: float = 1.0  # factor of first-token and queue deadlines, and of the SLO used in the ratio
    accept_new: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDecision(Decision):
    """The base of every decision about one instance of one worker."""

    worker: str  # the worker's stable name
    instance: str  # id of one instance of the worker, from its start to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged(WorkerDecision):
    """A worker's health or its weight changed (a ramp changes only the weight)."""

    before: HealthStatus
    after: HealthStatus
    reason: str
    weight: float  # share of the traffic, 0 to 1
    unlimited: float | None = None  # its weight if no device limited it; None: the same as `weight`


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForgotten(WorkerDecision):
    """A worker that left for good is no longer part of the fleet: only the journal mentions it.

    Its conviction, if any, is kept for a worker of the same name that joins later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerOpened(WorkerDecision):
    """This worker gets no request until its trial, which is due at `retry_at`."""

    retry_at: datetime
    wait_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerHalfOpened(WorkerDecision):
    """One canary, the trial, is due. No result by `deadline` counts as a failure."""

    deadline: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerClosed(WorkerDecision):
    """The trial passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted(WorkerDecision):
    """This worker gets no new request; running ones may finish until `deadline`."""

    deadline: datetime
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEnded(WorkerDecision):
    """The drain is over: the worker is empty or left, its deadline passed, or it was resumed."""

    outcome: Literal["empty", "deadline", "left", "resumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCapped(WorkerDecision):
    """The ejection budget kept this doubtful worker in service, at `weight`; None lifts the cap."""

    weight: float | None  # share of the traffic, 0 to 1
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareActivated(WorkerDecision):
    """This spare now serves in place of a failed worker, which becomes a spare when it returns."""

    replaces: str  # the worker that failed
    reason: str  # why it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareReleased(WorkerDecision):
    """This worker is a spare again: the worker that it replaced is healthy and serves."""

    returned: str  # the worker that serves again


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenAgreed(Decision):
    """Two instances on different workers gave this answer (or it was configured): from now on a deviation convicts."""

    canary_key: str
    canary: str
    by: tuple[str, ...]
    tied: tuple[str, ...] = ()  # of these, workers that deviate from the golden at a near tie


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRetired(Decision):
    """This golden no longer counts; workers vote on the next answers again."""

    canary_key: str
    canary: str
    reason: str
    outvoted_by: tuple[
        str, ...
    ] = ()  # workers with equal answers that outvoted an agreed golden, which no longer convicts them


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradationChanged(Decision):
    """A model's degradation level changed."""

    model: str
    before: int  # level, 0 to 4
    after: int  # level, 0 to 4
    ratio: float  # capacity / SLO throughput at the decision
    knobs: Knobs
    capacity_rps: float
    predicted_rps: float = 0.0  # capacity under the new level: its smaller batch lowers throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentOpened(Decision):
    """An incident began. Every event that follows from it carries this incident's id."""

    subject: str  # worker:w3, model:llama
    symptom: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentClosed(Decision):
    """Everything that belonged to this incident has recovered, or is gone for good."""

    subject: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAdopted(Decision):
    """From here on the controller decides by this policy and this version of the deciders."""

    policy: Json
    deciders_version: int  # grows whenever the same facts would lead to another decision
    kinds: tuple[str, ...] | None = None  # kinds beyond those of 0.2.0 that may be written from here on
    allowed_by: str = ""  # operator that allowed them before every process knew them
    command: str = ""  # id of that operator's command


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorbed(Decision):
    """Nothing was due. This only records how far the controller has read, so that pending stays small."""
