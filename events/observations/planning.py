"""Observations of traffic, capacity and scaling, which the planner reads and writes."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from events.fact import Observation
from events.observations.requests import FrontendObservation


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficReported(FrontendObservation):
    """The traffic of one frontend for one model within one minute.

    Minutes without traffic are reported, too. So a missing report does not mean that there was no traffic.
    """

    model: str
    minute: datetime  # start of the minute, by the frontend's clock
    requests: int  # number of requests that were sent to a worker; a retried request counts once
    prompt_tokens: int
    prompt_tokens_squared: int  # sum of the squares of the prompts' lengths
    output_tokens: int  # output tokens of the answers that ended within the minute
    late: int  # number of answers that ended within the minute and missed the objective for the first token or the pace
    # number of further requests that were rejected, although one more worker might have served them
    rejected: int
    last: bool = False  # the frontend is stopping and will report no later minute


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelObservation(Observation):
    """The base of facts about one model."""

    entity: ClassVar[str] = "model"
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReported(ModelObservation):
    """The capacity of a model's workers, reported on each change and once a minute."""

    planner: str
    provisioned: int  # number of workers that exist in any state, without those that drain
    healthy: int  # number of provisioned workers to which requests are sent
    lost: int  # number of provisioned workers to replace: dead, convicted or out of service
    gpus: int  # number of GPUs of one worker
    achievable_rps: float  # requests of average size per second that the healthy workers serve in time
    ratio: float  # `achievable_rps` divided by what all provisioned workers would achieve
    position: int  # stream sequence up to which the state store was read


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleProposed(ModelObservation):
    """A planner proposed another number of workers. If two planners propose at the same time, only one proposal is written."""

    planner: str
    before: int  # number of workers that were provisioned
    after: int  # number of workers that the planner proposes
    why: str  # reason: up, down, lost, floor, operator
    needed: int  # number of workers for the expected load; 0: the proposal is not derived from traffic
    method: str  # forecasting method; empty: no forecast was used
    error: float | None  # recent error of this method, relative to the actual load; None: not known
    bound: str  # the limit that determines `needed`: first_token, token_time, batch, kv
    held: str  # what limited the size of this change; empty: the change was not limited
    by: str  # what should apply the proposal: supervisor, command, http; empty: not specified
    position: int  # stream sequence up to which the state store was read


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSet(ModelObservation):
    """An operator fixed the number of workers. This number overrides the planner until an operator releases it."""

    workers: int | None  # the fixed number; None: the operator released it
    by: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleApplied(ModelObservation):
    """A planner's proposal was carried out (`ok` is true), or could not be carried out (`ok` is false)."""

    proposal: str  # id of the ScaleProposed
    after: int  # number of workers that were proposed
    by: str  # what applied the proposal: supervisor, command, http
    ok: bool
    says: str  # what was done, or why the proposal could not be carried out
