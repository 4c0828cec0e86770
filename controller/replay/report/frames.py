"""Computes the fleet states that the time slider of a report page shows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from controller.deciders.fleet import Fleet
from controller.read_model.fleet_view import WorkerView, share_of
from events.fact import Decision, Recorded
from events.order import Order


@dataclass(frozen=True, slots=True)
class Frame:
    """The changes that one event makes on the report page.

    The first frame of a report holds the whole initial state."""

    seq: int
    at: datetime
    # changed workers by name; None: the worker is no longer part of the fleet
    workers: Mapping[str, WorkerView | None]
    levels: Mapping[str, int]  # degradation level by model
    capacity: float  # share of the fleet that serves, 0 to 1: mean weight of all workers except spares, weighted by GPUs


def frames(order: Order[Fleet], events: Iterable[Recorded], at: datetime) -> list[Frame]:
    """Fold events into the fleet state of `order`, and return a frame for each event that changes the report page.

    An additional first frame, with the time `at`, holds the state before the events."""
    fleet = order.shown
    shown = {name: WorkerView.of(worker) for name, worker in fleet.workers.items()}
    levels = _levels(fleet)
    found = [Frame(order.last_seq, at, dict(shown), levels, share_of(shown.values()))]
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
        found.append(Frame(event.seq, event.at, changed, moved, share_of(shown.values())))
        levels = moved
    return found


def _changed(
    before: Fleet, after: Fleet, shown: Mapping[str, WorkerView], only: str | None
) -> Iterable[tuple[str, WorkerView | None]]:
    """Yield the name and new view of each worker that an event changes on the page.

    The view is None if the worker left the fleet. `shown` holds the views before the event. `only` names the single worker that
    the event can have changed; None means that the event can have changed any worker."""
    if after.workers is before.workers:
        return
    if only is not None and only in after.workers:
        if (one := WorkerView.of(after.workers[only])) != shown.get(only):
            yield only, one
        return
    for name, worker in after.workers.items():
        if worker is not before.workers.get(name) and (one := WorkerView.of(worker)) != shown.get(name):
            yield name, one
    for name in shown:
        if name not in after.workers:
            yield name, None


def _levels(fleet: Fleet) -> dict[str, int]:
    return {name: model.level for name, model in fleet.models.items()}


class Stretch(NamedTuple):
    """A span of time in which a field of a worker, such as its breaker, had the value `what`."""

    worker: str
    what: str
    start: datetime
    end: datetime


def stretches(found: Sequence[Frame], end: datetime, field: str) -> list[Stretch]:
    """Return the spans of time in which a field of `WorkerView` kept one value, for each worker.

    If a worker is still in the fleet at the last frame, its last span ends at `end`."""
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
