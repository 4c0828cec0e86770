"""Who is awaited: whose process is there, and cannot join yet?

    (nobody) ── WorkerAwaited ──▶ awaited ── joined, left in good order, or unsaid for `AWAITED_FOR` ──▶ (nobody)

What a reader would get wrong: a process that falls while it waits is awaited all the same, for its supervisor starts it
again; if nobody does, time ends it. That time is between two facts of the stream, so no two clocks are compared, and as it
is the fold's and not a policy's, everybody who reads the journal sees the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from events.observations import WorkerAwaited

AWAITED_FOR = timedelta(minutes=10)  # after it was said last; it is said every two minutes
AWAITED_MAX = 10_000  # workers; more than that is somebody's mistake


@dataclass(frozen=True, slots=True)
class AwaitedWorker:
    """A worker that has not joined yet, in the life that it begins."""

    worker: str
    instance: str
    model: str  # empty: not known
    reason: str  # why it cannot join
    since: datetime  # it, or the life before, waits: by the journal's time, here and below
    said_at: datetime  # last


Awaited = Mapping[str, AwaitedWorker]


def evolve(awaited: Awaited, fact: WorkerAwaited, at: datetime, model: str) -> Awaited:
    """Take in that a worker waits. `model`: what its last life served, where there was one."""
    before = awaited.get(fact.worker)
    if before is None and len(awaited) >= AWAITED_MAX:
        return awaited
    known = fact.model or (before.model if before is not None else "") or model
    since = before.since if before is not None else at
    said = AwaitedWorker(fact.worker, fact.instance, known, fact.reason, since, at)
    return {**awaited, fact.worker: said}


def end(awaited: Awaited, worker: str, instance: str = "") -> Awaited:
    """Wait no longer for a worker: a life of it has joined, or this `instance` was told to leave."""
    waiting = awaited.get(worker)
    if waiting is None or (instance and waiting.instance != instance):
        return awaited
    return {name: other for name, other in awaited.items() if name != worker}


def over(awaited: Awaited, at: datetime) -> Awaited:
    """Drop those that have not said for long that they still wait."""
    if all(at - one.said_at <= AWAITED_FOR for one in awaited.values()):
        return awaited
    return {name: one for name, one in awaited.items() if at - one.said_at <= AWAITED_FOR}
