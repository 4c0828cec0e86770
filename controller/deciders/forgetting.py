"""When is a worker that has left for good no part of the fleet any more?

    DEAD ── for `forget_after`, its incident over, nobody awaited in its place ──▶ forgotten

What a reader would get wrong: forgotten is what the fleet shows, not all that it knows (`Fleet.departed`). What convicts
hardware or weights outlives a life: who joins later under the same name may have the same bad device. And a process that was
cut off for long may come back and believe that it serves: it must still be told that it is dead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from controller.deciders.health_state import ENGINE, SILENT
from controller.deciders.validation import STRICT, at_least
from controller.deciders.worker import LONG_AGO, Worker
from events.decisions import WorkerForgotten
from events.fact import Decision

DEPARTED_MAX = 1000  # remembered; beyond, the first that left is not, of those that nothing stands against


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgettingPolicy:
    """How long a dead worker is shown."""

    forget_after: timedelta | None = timedelta(minutes=10)  # None: for ever
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if self.forget_after is not None:
            at_least(0, forget_after=self.forget_after)


def decide(policy: ForgettingPolicy, worker: Worker, awaited: bool, now: datetime) -> tuple[Decision, ...]:
    """Say whether a worker is to be forgotten. `awaited`: its next life is there, and cannot join yet."""
    due = due_at(policy, worker)
    if due is None or now < due or awaited or worker.incident:
        return ()
    about = worker.joined
    cause = f"decision:{worker.health.moved_by}"
    return (WorkerForgotten(worker=about.worker, instance=about.instance, decided_at=now, cause=cause),)


def due_at(policy: ForgettingPolicy, worker: Worker) -> datetime | None:
    """Return from when on time has passed enough."""
    if worker.alive or policy.forget_after is None:
        return None
    return (worker.health.dead_since or LONG_AGO) + policy.forget_after


def remember(departed: Mapping[str, Worker], worker: Worker) -> Mapping[str, Worker]:
    """Keep a forgotten worker among those that are remembered."""
    known = {**departed, worker.joined.worker: worker}
    if len(known) > DEPARTED_MAX:
        del known[next((name for name, one in known.items() if not _stained(one)), next(iter(known)))]
    return known


def _stained(worker: Worker) -> bool:
    """Return whether anything stands against a worker, or what it has said, that its next life would inherit."""
    inherited = [one for one in worker.health.convictions if one not in (SILENT, ENGINE)]
    return bool(inherited or worker.convictions)
