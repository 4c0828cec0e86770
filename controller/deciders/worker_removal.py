"""Removes dead workers from the list of the fleet after some time.

    DEAD ── for `forget_after`, its incident closed, no next instance awaited ──▶ forgotten

A forgotten worker is no longer listed, but `Fleet.departed` still contains it, for two reasons. A worker that later joins
under the same name may have the same bad device or weights. And a process that was disconnected for a long time may
reconnect and continue to serve, so it must still be notified that its instance is dead.
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
    """How long a dead worker stays listed."""

    forget_after: timedelta | None = timedelta(minutes=10)  # from death to removal; None: never
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if self.forget_after is not None:
            at_least(0, forget_after=self.forget_after)


def decide(policy: ForgettingPolicy, worker: Worker, awaited: bool, now: datetime) -> tuple[Decision, ...]:
    """Return the decision to forget a dead worker, as a tuple of one; an empty tuple if the decision is not due.

    `awaited` tells whether the worker's next instance waits to join. A worker is not forgotten while its next instance waits
    to join, or while it has an open incident.
    """
    due = due_at(policy, worker)
    if due is None or now < due or awaited or worker.incident:
        return ()
    about = worker.joined
    cause = f"decision:{worker.health.moved_by}"
    return (WorkerForgotten(worker=about.worker, instance=about.instance, decided_at=now, cause=cause),)


def due_at(policy: ForgettingPolicy, worker: Worker) -> datetime | None:
    """Return the earliest time at which the worker may be forgotten; None if it is alive or is never forgotten."""
    if worker.alive or policy.forget_after is None:
        return None
    return (worker.health.dead_since or LONG_AGO) + policy.forget_after


def remember(departed: Mapping[str, Worker], worker: Worker) -> Mapping[str, Worker]:
    """Return the departed workers with `worker` added, limited to DEPARTED_MAX workers.

    Beyond this limit, the oldest worker without evidence against it is dropped. If there is evidence against every worker, the
    oldest worker is dropped.
    """
    known = {**departed, worker.joined.worker: worker}
    if len(known) > DEPARTED_MAX:
        del known[next((name for name, one in known.items() if not _stained(one)), next(iter(known)))]
    return known


def _stained(worker: Worker) -> bool:
    """Return whether a worker's next instance would inherit a conviction or a record of wrong answers."""
    inherited = [one for one in worker.health.charges.convictions if one not in (SILENT, ENGINE)]
    return bool(inherited or worker.convictions)
