"""How does what is read of the state store become what the planner decides by? And what can a model's workers carry?"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil, inf

from controller.deciders.capacity import Slo, attainable, fleet_capacity
from controller.planner.history import ModelHistory
from controller.planner.plan import ModelView, PlannerPolicy
from controller.planner.sizing import Objectives
from events.observations import Profile, ScaleProposed


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One worker's row, as far as it matters here."""

    worker: str
    model: str
    profile: Profile
    gpus: int
    weight: float  # of its share of the traffic, 0 to 1
    leaving: bool  # it drains, or has left in good order: it is not counted
    out_s: float = 0.0  # for so long nothing has been sent to it
    spare: bool = False  # it is kept back, and not counted: another serves in its place, or it has none

    @property
    def serves(self) -> bool:
        """Whether requests are sent to it."""
        return self.weight > 0 and not self.leaving


@dataclass(frozen=True, slots=True)
class Promised:
    """What a model has promised, and how much of its throughput there must be so that nothing of it is given up."""

    slo: Slo
    share: float  # of `slo_throughput_rps`: with less the degradation ladder takes or keeps a level


@dataclass(frozen=True, slots=True)
class ModelCapacity:
    """What the workers of one model can carry."""

    provisioned: int
    healthy: int
    lost: int
    gpus: int  # of one worker
    achievable_rps: float  # requests per second, of the healthy ones
    ratio: float  # of what all that are provisioned would carry


def capacity_of(workers: Sequence[PlannedWorker], slo: Slo, lost_after_s: float) -> ModelCapacity:
    """Return what one model's workers can carry within its objectives."""
    counted = [worker for worker in workers if not (worker.leaving or worker.spare)]
    whole = [(worker.profile, 1.0) for worker in counted]
    within = attainable(slo, whole)
    serving = [(worker.profile, worker.weight) for worker in counted if worker.serves]
    achievable = fleet_capacity(serving, within).effective_capacity_rps
    of_all = fleet_capacity(whole, within).effective_capacity_rps
    return ModelCapacity(
        provisioned=len(counted),
        healthy=len(serving),
        lost=sum(not worker.serves and worker.out_s > lost_after_s for worker in counted),
        gpus=max((worker.gpus for worker in counted), default=1),
        achievable_rps=round(achievable, 3),
        ratio=round(achievable / of_all, 4) if of_all > 0 else 0.0,
    )


def view_of(
    workers: Sequence[PlannedWorker],
    history: ModelHistory,
    promised: Promised,
    policy: PlannerPolicy,
    lost_after_s: float,
    now: datetime,
) -> ModelView | None:
    """Return one model as the decider wants it; None: none of its workers is known, so that nobody knows what one can do."""
    if not workers:
        return None
    capacity = capacity_of(workers, promised.slo, lost_after_s)
    profile = Counter(worker.profile for worker in workers).most_common(1)[0][0]
    within = attainable(promised.slo, [(profile, 1.0)])
    objectives = Objectives(
        ttft_ms=inf if within.slo_ttft_ms is None else within.slo_ttft_ms,
        tpot_ms=inf if within.slo_tpot_ms is None else within.slo_tpot_ms,
        missed=policy.missed,
    )
    return ModelView(
        model=history.model,
        provisioned=_provisioned(capacity, history, policy, now),
        lost=capacity.lost,
        gpus=capacity.gpus,
        profile=profile,
        objectives=objectives,
        minutes=history.minutes(now),
        set_by_operator=history.set_by_operator,
        floor=_floor(profile, within, promised.share),
        changes=history.changes(now),
    )


def _floor(profile: Profile, slo: Slo, share: float) -> int:
    """Return how many workers carry this share of the throughput that is promised; 0: none is."""
    one = fleet_capacity([(profile, 1.0)], slo).effective_capacity_rps
    wanted = (slo.slo_throughput_rps or 0.0) * share
    return ceil(wanted / one - 1e-9) if wanted > 0 and one > 0 else 0


def _provisioned(capacity: ModelCapacity, history: ModelHistory, policy: PlannerPolicy, now: datetime) -> int:
    """Return how many workers there are, those that are starting and that are to drain as they were told to."""
    applied, proposed = history.last_applied, history.last_proposal
    if applied is None or proposed is None or now - applied.at > timedelta(seconds=policy.start_s):
        return capacity.provisioned
    assert isinstance(proposed.fact, ScaleProposed)
    return proposed.fact.after if history.carried_out(proposed) else capacity.provisioned
