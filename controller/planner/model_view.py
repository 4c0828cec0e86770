"""Converts rows of the state store into the planner's input for each model."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil, inf
from typing import Any, TypeAlias

from controller.deciders.capacity import Slo, attainable, fleet_capacity
from controller.planner.history import ModelHistory
from controller.planner.plan import ModelView, PlannerPolicy
from controller.planner.sizing import Objectives
from events import codec
from events.observations import Profile, ScaleProposed, WorkerJoined


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """The properties of one worker that the planner uses."""

    worker: str
    model: str
    profile: Profile
    gpus: int
    weight: float  # its share of traffic, 0 to 1
    leaving: bool  # it drains or has left gracefully, and is not counted
    out_s: float = 0.0  # seconds for which nothing has been sent to it
    spare: bool = False  # it is a spare, and not counted

    @property
    def serves(self) -> bool:
        """Whether the worker gets requests."""
        return self.weight > 0 and not self.leaving


@dataclass(frozen=True, slots=True)
class ModelCapacity:
    """The counts of one model's workers, and their combined capacity."""

    provisioned: int
    healthy: int
    lost: int
    gpus: int  # of one worker
    achievable_rps: float  # requests per second of the healthy workers
    ratio: float  # of the capacity of all provisioned workers


def capacity_of(workers: Sequence[PlannedWorker], slo: Slo, lost_after_s: float) -> ModelCapacity:
    """Return the counts of one model's workers, and the load that they can serve within the model's SLO.

    A worker counts as lost if it has received no requests for more than `lost_after_s` seconds.
    """
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
    slo: Slo,
    share: float,
    policy: PlannerPolicy,
    lost_after_s: float,
    now: datetime,
) -> ModelView | None:
    """Return the planner's input for one model; None if no worker of the model is known.

    The number of workers to propose depends on a worker's speed, which is unknown without a worker. `share` is the fraction
    of the SLO's throughput for which the planner always keeps capacity. With less capacity, the model would enter a degradation
    level, or stay in it. A worker counts as lost if it has received no requests for more than `lost_after_s` seconds.
    """
    if not workers:
        return None
    capacity = capacity_of(workers, slo, lost_after_s)
    profile = Counter(worker.profile for worker in workers).most_common(1)[0][0]
    within = attainable(slo, [(profile, 1.0)])
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
        floor=_floor(profile, within, share),
        changes=history.changes(now),
    )


def _floor(profile: Profile, slo: Slo, share: float) -> int:
    """Return the smallest number of workers that can carry `share` of the SLO's throughput.

    The result is 0 if the model has no throughput SLO, or if a worker has no capacity within the SLO.
    """
    one = fleet_capacity([(profile, 1.0)], slo).effective_capacity_rps
    wanted = (slo.slo_throughput_rps or 0.0) * share
    return ceil(wanted / one - 1e-9) if wanted > 0 and one > 0 else 0


def _provisioned(capacity: ModelCapacity, history: ModelHistory, policy: PlannerPolicy, now: datetime) -> int:
    """Return the number of provisioned workers, as counted in `capacity`.

    For `policy.start_s` seconds after a proposal was applied, return the proposed number instead, because workers may still be
    starting or draining.
    """
    applied, proposed = history.last_applied, history.last_proposal
    if applied is None or proposed is None or now - applied.at > timedelta(seconds=policy.start_s):
        return capacity.provisioned
    assert isinstance(proposed.fact, ScaleProposed)
    return proposed.fact.after if history.carried_out(proposed) else capacity.provisioned


WorkerRow: TypeAlias = Mapping[str, Any]  # of the state store, by column
LEFT = "left: graceful"  # `reason` of a worker that will not return by itself


class WorkersSeen:
    """Records for how long each worker has received no requests, because the state store does not contain this time."""

    def __init__(self) -> None:
        """Create an empty record."""
        self._out_since: dict[str, float] = {}
        self._joined: dict[str, tuple[str, WorkerJoined]] = {}  # by worker: the text, and the parsed fact

    def by_model(self, rows: Sequence[WorkerRow], now: float) -> dict[str, list[PlannedWorker]]:
        """Return the workers of each model in `rows`. `now` is in seconds of a monotonic clock."""
        found: dict[str, list[PlannedWorker]] = defaultdict(list)
        names = {row["worker"] for row in rows}
        for known in (self._out_since, self._joined):
            for gone in known.keys() - names:
                del known[gone]
        for row in rows:
            worker = self._worker(row, now)
            found[worker.model].append(worker)
        return dict(found)

    def _worker(self, row: WorkerRow, now: float) -> PlannedWorker:
        name, joined = row["worker"], self._read(row["worker"], row["joined"])
        leaving = bool(row["drain"]) or row["health"] == "DRAINING" or LEFT in row["reason"]
        if row["weight"] > 0:
            self._out_since.pop(name, None)
            out_s = 0.0
        else:
            out_s = now - self._out_since.setdefault(name, now)
        gpus = max(1, joined.tp) * max(1, joined.dp)
        kept = row["spare"]
        return PlannedWorker(name, row["model"], joined.profile, gpus, row["weight"], leaving, out_s, kept)

    def _read(self, worker: str, text: str) -> WorkerJoined:
        known = self._joined.get(worker)
        if known is None or known[0] != text:
            fact = codec.decode_body(WorkerJoined.kind(), text.encode())
            assert isinstance(fact, WorkerJoined)
            known = self._joined[worker] = (text, fact)
        return known[1]
