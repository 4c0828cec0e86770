"""What is observed of load and of how many workers carry it: by frontends, planners, operators, and whoever scales."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from events.fact import Observation
from events.observations.requests import FrontendObservation


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficReported(FrontendObservation):
    """What came to one frontend for one model within one minute. It is said of every minute, also where nothing
    came: a minute of which nobody tells is not one without traffic."""

    model: str
    minute: datetime  # when it began, by the frontend's clock
    requests: int  # that were sent to a worker, each once
    prompt_tokens: int
    prompt_tokens_squared: int  # each prompt's, added up
    output_tokens: int  # of the answers that ended within it
    late: int  # answers that ended within it, and had begun or gone on later than the objectives allow
    rejected: int  # requests besides: turned away, though one more worker might have served them
    last: bool = False  # this frontend stops: it tells of no minute after this one


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelObservation(Observation):
    """Something about one model."""

    entity: ClassVar[str] = "model"
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReported(ModelObservation):
    """What the workers of a model can carry: on each change, and once a minute."""

    planner: str
    provisioned: int  # workers that are there, whatever they do; without those that drain
    healthy: int  # of them: requests are sent to them
    lost: int  # of them: dead, convicted or out of service, so that they have to be replaced
    gpus: int  # of one worker
    achievable_rps: (
        float  # requests per second of the objectives' average size that the healthy ones carry within them
    )
    ratio: float  # of what all that are provisioned would carry
    position: int  # stream sequence up to which the state store was read


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleProposed(ModelObservation):
    """A planner holds another number of workers for right. Of two that propose at once only one is written."""

    planner: str
    before: int  # workers that were provisioned
    after: int  # that should be
    why: str  # up, down, lost, floor, operator
    needed: int  # for what is expected; 0: it does not follow from traffic
    method: str  # by which the load was foreseen; empty: it was not
    error: float | None  # of this method lately: what it was off by, over what came
    bound: str  # what needs them: first_token, token_time, batch, kv
    held: str  # what keeps more from being changed at once; empty: nothing
    by: str  # who is to carry it out: supervisor, command, http; empty: whoever likes
    position: int  # stream sequence up to which the state store was read


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSet(ModelObservation):
    """An operator wants this number of workers, whatever the planner holds for right, until he releases it."""

    workers: int | None  # None: released
    by: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleApplied(ModelObservation):
    """A proposal was carried out, or could not be."""

    proposal: str  # id of the ScaleProposed
    after: int  # workers that it wanted
    by: str  # supervisor, command, http
    ok: bool
    says: str  # what was done, or why not
