"""Observations of traffic, capacity and scaling."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from events.fact import Observation
from events.observations.requests import FrontendObservation


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficReported(FrontendObservation):
    """The traffic of one frontend for one model within one minute. Minutes without traffic are reported, too: so a missing report
    does not mean that there was no traffic."""

    model: str
    minute: datetime  # its start, by the frontend's clock
    requests: int  # requests that were sent to a worker, each counted once
    prompt_tokens: int
    prompt_tokens_squared: int  # sum of the squares of the prompts' lengths
    output_tokens: int  # of the answers that ended within the minute
    late: int  # answers that ended within it and missed an objective for first token or pace
    rejected: int  # further requests: rejected, though one more worker might have served them
    last: bool = False  # the frontend is stopping: it will report no later minute


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelObservation(Observation):
    """The base of facts about one model."""

    entity: ClassVar[str] = "model"
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReported(ModelObservation):
    """The capacity of a model's workers. Reported on each change, and once a minute."""

    planner: str
    provisioned: int  # workers that exist, in any state; without those that drain
    healthy: int  # of these, workers that requests are sent to
    lost: int  # of these, workers to be replaced: dead, convicted or out of service
    gpus: int  # of one worker
    achievable_rps: float  # requests per second (of average size) that healthy workers serve in time
    ratio: float  # `achievable_rps` over what all provisioned workers would achieve
    position: int  # stream sequence up to which the state store was read


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleProposed(ModelObservation):
    """A planner proposed another number of workers. Of two proposals at the same time only one is written."""

    planner: str
    before: int  # workers that were provisioned
    after: int  # workers that are proposed
    why: str  # up, down, lost, floor, operator
    needed: int  # workers for the expected load; 0: not derived from traffic
    method: str  # forecasting method; empty: no forecast
    error: float | None  # recent error of this method, relative to the actual load
    bound: str  # what determines `needed`: first_token, token_time, batch, kv
    held: str  # what limited the size of this change; empty: nothing
    by: str  # what should apply it: supervisor, command, http; empty: not specified
    position: int  # stream sequence up to which the state store was read


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSet(ModelObservation):
    """An operator fixed the number of workers: it overrides the planner until an operator releases it."""

    workers: int | None  # None: released
    by: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleApplied(ModelObservation):
    """A proposal was carried out, or could not be."""

    proposal: str  # id of the ScaleProposed
    after: int  # workers that were proposed
    by: str  # supervisor, command, http
    ok: bool
    says: str  # what was done, or why it failed
