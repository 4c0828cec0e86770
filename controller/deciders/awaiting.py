"""Awaited workers: their process runs, but cannot join yet.

    (absent) ── WorkerAwaited ──▶ awaited ── joined, left gracefully, or not repeated for `AWAITED_FOR` ──▶ (absent)

A process that crashes while it waits stays awaited, because its supervisor restarts it. If it is not restarted, the
timeout removes it. The timeout is measured between two facts of the stream, so no two clocks are compared. It is a
constant of the fold, not a policy setting, so that every reader of the journal computes the same set.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from events.observations import WorkerAwaited

AWAITED_FOR = timedelta(minutes=10)  # after the last WorkerAwaited; workers repeat it every two minutes
AWAITED_MAX = 10_000  # workers; more than that is a mistake


@dataclass(frozen=True, slots=True)
class AwaitedWorker:
    """A worker that has not joined yet, with the instance id under which it will join."""

    worker: str
    instance: str
    model: str  # empty: unknown
    reason: str  # why it cannot join
    since: datetime  # when this or the previous instance began to wait; journal time, here and below
    said_at: datetime  # time of the last WorkerAwaited


Awaited = Mapping[str, AwaitedWorker]


def evolve(awaited: Awaited, fact: WorkerAwaited, at: datetime, model: str) -> Awaited:
    """Apply a `WorkerAwaited`. `model`: the model of the worker's previous instance; empty if there was none."""
    before = awaited.get(fact.worker)
    if before is None and len(awaited) >= AWAITED_MAX:
        return awaited
    known = fact.model or (before.model if before is not None else "") or model
    since = before.since if before is not None else at
    latest = AwaitedWorker(fact.worker, fact.instance, known, fact.reason, since, at)
    return {**awaited, fact.worker: latest}


def end(awaited: Awaited, worker: str, instance: str = "") -> Awaited:
    """Stop awaiting a worker: one of its instances has joined, or this `instance` has left gracefully."""
    waiting = awaited.get(worker)
    if waiting is None or (instance and waiting.instance != instance):
        return awaited
    return {name: other for name, other in awaited.items() if name != worker}


def over(awaited: Awaited, at: datetime) -> Awaited:
    """Drop the workers with a last `WorkerAwaited` older than `AWAITED_FOR`."""
    if all(at - one.said_at <= AWAITED_FOR for one in awaited.values()):
        return awaited
    return {name: one for name, one in awaited.items() if at - one.said_at <= AWAITED_FOR}
