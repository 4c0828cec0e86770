"""Removal of dead workers from the fleet.

    DEAD ── for `forget_after`, its incident closed, no next instance awaited ──▶ forgotten

A forgotten worker is no longer listed in the fleet, but `Fleet.departed` still contains it. Evidence against hardware or
weights outlives an instance: a worker that later joins under the same name may have the same bad device. A process that was
cut off for a long time may also reconnect and continue to serve; it must still be notified that it is dead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from controller.deciders.health_state import ENGINE, SILENT
from controller.deciders.validation import STRICT, at_least
from controller.deciders.worker import LONG_AGO, Worker
from events.decisions import WorkerForgotten
from events.fact import Decision

DEPARTED_MAX = 1000  # remembered workers; beyond that the oldest without evidence against it is dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgettingPolicy:
    """How long a dead worker stays visible."""

    forget_after: timedelta | None = timedelta(minutes=10)  # from death to removal; None: never
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if self.forget_after is not None:
            at_least(0, forget_after=self.forget_after)


def decide(policy: ForgettingPolicy, worker: Worker, awaited: bool, now: datetime) -> tuple[Decision, ...]:
    """Return the decision to forget a worker, if due. `awaited`: the worker's next instance waits to join."""
    due = due_at(policy, worker)
    if due is None or now < due or awaited or worker.incident:
        return ()
    about = worker.joined
    cause = f"decision:{worker.health.moved_by}"
    return (WorkerForgotten(worker=about.worker, instance=about.instance, decided_at=now, cause=cause),)


def due_at(policy: ForgettingPolicy, worker: Worker) -> datetime | None:
    """Return the time from which the worker may be forgotten; None if it is alive or is never forgotten."""
    if worker.alive or policy.forget_after is None:
        return None
    return (worker.health.dead_since or LONG_AGO) + policy.forget_after


def remember(departed: Mapping[str, Worker], worker: Worker) -> Mapping[str, Worker]:
    """Add a forgotten worker to the departed ones. Beyond DEPARTED_MAX drop one of them."""
    known = {**departed, worker.joined.worker: worker}
    if len(known) > DEPARTED_MAX:
        del known[next((name for name, one in known.items() if not _stained(one)), next(iter(known)))]
    return known


def _stained(worker: Worker) -> bool:
    """Return whether there is evidence against a worker, or its answers, that its next instance would inherit."""
    inherited = [one for one in worker.health.convictions if one not in (SILENT, ENGINE)]
    return bool(inherited or worker.convictions)
