"""Spare workers: loaded and idle, each ready to replace a lost worker of its kind.

    spare ── a worker of its kind is lost ──▶ serves instead; the lost worker becomes a spare
    replacement ── `on_return` is release, and the replaced worker is healthy again ──▶ spare; the replaced worker serves

The role belongs to a worker's name and is kept across its instances. A spare replaces a worker and never adds one, so the
number of serving workers stays the same. A replaced worker that recovers becomes a spare, and gets no traffic until it
replaces another worker. A spare is always a whole worker with all of its ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from controller.deciders.validation import STRICT
from controller.deciders.worker import Worker
from events.decisions import SpareActivated, SpareReleased
from events.fact import Decision

OnReturn: TypeAlias = Literal["swap", "release"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparesPolicy:
    """What happens to a spare when the worker that it replaces is healthy again."""

    # swap: the returning worker becomes the spare; release: it gets its place back
    on_return: OnReturn = "swap"
    __pydantic_config__ = STRICT


def decide(policy: SparesPolicy, workers: Sequence[Worker], now: datetime) -> Iterator[Decision]:
    """Yield a SpareActivated for each lost worker with a suitable spare.

    With `on_return` "release", also yield a SpareReleased for each replacement that is no longer needed.
    """
    spares, gone = [one for one in workers if one.spare.kept and one.fully_healthy], set[str]()
    if policy.on_return == "release":
        for worker, back in _returned(workers, spares):
            spares.remove(back)
            gone.add(worker.joined.worker)
            yield SpareReleased(
                worker=worker.joined.worker,
                instance=worker.joined.instance,
                returned=back.joined.worker,
                decided_at=now,
                cause=back.last_move,
            )
    for lost in workers:
        name, reason = lost.joined.worker, lost.lost
        if not reason or lost.spare.kept or name in gone:
            continue
        if (best := _best(spares, lost)) is not None:
            spares.remove(best)
            yield SpareActivated(
                worker=best.joined.worker,
                instance=best.joined.instance,
                replaces=name,
                reason=reason,
                incident=lost.incident,
                decided_at=now,
                cause=lost.last_move,
            )


def _best(spares: Iterable[Worker], lost: Worker) -> Worker | None:
    """Return the best spare for a lost worker; None if there is no spare of the lost worker's kind.

    A spare on another host is preferred, because a host failure affects every worker on the host.
    """
    host, able = lost.joined.topology.host or None, (spare for spare in spares if spare.kind == lost.kind)
    return min(able, key=lambda one: (one.joined.topology.host == host, one.joined.worker), default=None)


def _returned(workers: Sequence[Worker], spares: Sequence[Worker]) -> list[tuple[Worker, Worker]]:
    """Return pairs (replacement, replaced worker), one for each replaced worker that is now a ready spare."""
    ready = {one.joined.worker: one for one in spares}
    serving = (one for one in workers if not one.spare.kept)
    return [(one, ready[one.spare.place]) for one in serving if one.spare.place in ready]
