"""Precomputed states of the fleet for the report's slider: one per event that changes what is shown."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from controller.deciders.fleet import Fleet, Worker
from events.decisions import HealthStatus
from events.fact import Decision, Recorded
from events.order import Order

SPARE, RAMPING, CAPPED = "SPARE", "RAMPING", "CAPPED"
WELL = (HealthStatus.HEALTHY.value, SPARE)


class WorkerShown(NamedTuple):
    """The fields that the report shows of a worker, with the values of the state store (`holdfast replay at`)."""

    health: str
    weight: float  # share of the traffic, 0 to 1
    breaker: str
    reason: str
    incident: str
    state: str  # color of its lane: the health; for a healthy worker SPARE, RAMPING (towards its full weight) or CAPPED
    spare: bool  # the worker waits as a spare and serves no requests
    gpus: int  # number of GPUs
    model: str


@dataclass(frozen=True, slots=True)
class Frame:
    """The changes that one event makes."""

    seq: int
    at: datetime
    workers: Mapping[str, WorkerShown | None]  # None: the worker is no longer part of the fleet
    levels: Mapping[str, int]  # degradation level by model
    capacity: float  # serving share of all workers except spares: mean weight, weighted by GPUs


def frames(order: Order[Fleet], events: Iterable[Recorded], at: datetime) -> list[Frame]:
    """Fold events. Return a frame of the initial state at time `at`, and one for each event that changes the shown state."""
    fleet = order.shown
    shown = {name: shown_of(worker) for name, worker in fleet.workers.items()}
    levels = _levels(fleet)
    found = [Frame(order.last_seq, at, dict(shown), levels, capacity(shown.values()))]
    for event in events:
        before, fleet = fleet, order.absorb(event)
        only = None if isinstance(event.fact, Decision) else getattr(event.fact, "worker", None)
        changed = dict(_changed(before, fleet, shown, only))
        moved = _levels(fleet) if fleet.models is not before.models else levels
        if not changed and moved == levels:
            continue
        for name, one in changed.items():
            if one is None:
                del shown[name]
            else:
                shown[name] = one
        found.append(Frame(event.seq, event.at, changed, moved, capacity(shown.values())))
        levels = moved
    return found


def _changed(
    before: Fleet, after: Fleet, shown: Mapping[str, WorkerShown], only: str | None
) -> Iterable[tuple[str, WorkerShown | None]]:
    """Yield the workers that are shown differently. `only` is the one worker that an observation can have changed."""
    if after.workers is before.workers:
        return
    if only is not None and only in after.workers:
        if (one := shown_of(after.workers[only])) != shown.get(only):
            yield only, one
        return
    for name, worker in after.workers.items():
        if worker is not before.workers.get(name) and (one := shown_of(worker)) != shown.get(name):
            yield name, one
    for name in shown:
        if name not in after.workers:
            yield name, None


def _levels(fleet: Fleet) -> dict[str, int]:
    return {name: model.level for name, model in fleet.models.items()}


def capacity(shown: Iterable[WorkerShown]) -> float:
    """Return the serving share of these workers: their mean weight, weighted by GPUs, without spares."""
    places = [(one.gpus, one.weight) for one in shown if not one.spare]
    whole = sum(gpus for gpus, _ in places)
    return sum(gpus * weight for gpus, weight in places) / whole if whole else 0.0


def shown_of(worker: Worker) -> WorkerShown:
    """Return the shown fields of a worker."""
    health, joined = worker.health, worker.joined
    state = health.status.value
    if health.status is HealthStatus.HEALTHY and worker.spare.kept:
        state = SPARE
    elif health.status is HealthStatus.HEALTHY and worker.weight < 1.0:
        state = CAPPED if health.weight < health.unlimited else RAMPING
    return WorkerShown(
        health.status.value,
        worker.weight,
        worker.breaker.position,
        "; ".join(worker.reasons),
        worker.incident,
        state,
        worker.spare.kept,
        len(joined.topology.gpus) or joined.tp * joined.dp,
        joined.model,
    )


class Stretch(NamedTuple):
    """A span of time in which a worker had one value of a field."""

    worker: str
    what: str
    start: datetime
    end: datetime


def stretches(found: Sequence[Frame], end: datetime, field: str) -> list[Stretch]:
    """Return the spans in which each worker had each value of a field of `WorkerShown`."""
    current: dict[str, tuple[str, datetime]] = {}
    finished: list[Stretch] = []
    for frame in found:
        for name, one in frame.workers.items():
            value = getattr(one, field) if one is not None else None
            before = current.get(name)
            if before is not None and before[0] == value:
                continue
            if before is not None:
                finished.append(Stretch(name, before[0], before[1], frame.at))
                del current[name]
            if value is not None:
                current[name] = (value, frame.at)
    return finished + [Stretch(name, value, start, end) for name, (value, start) in current.items()]
