"""The journal's limits of size and age, and the snapshots that must exist before events are dropped.

    first                    kept        last
      ▼                        ▼           ▼
      ├────────┼────────┼──────┼──────┼────┤
       dropped first     newest snapshot    an eighth of the bound at most

The line is the stream, from its first event to its last, and `kept` is the newest snapshot. The broker drops the oldest events
when the stream reaches a bound. From then on a new reader cannot start at the first event. So the leading controller writes a
snapshot of the fleet's state to the journal (`SnapshotKept`) whenever the journal has grown by an eighth of a bound. A snapshot
is also written before the stream gets bounds. A bound is set only if the newest snapshot is in the part of the stream that
remains. So a snapshot covers every dropped event.

Note: if no controller leads while the journal grows by seven eighths of a bound, the newest snapshot is dropped, too. Then a
new reader needs the state store's own snapshot, and cannot start without it.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from events import subjects
from events.journal.broker import ask
from events.journal.retention import JournalBounds
from events.journal.usage import JournalUsage
from events.json_types import Json, JsonView
from events.nats.connection import BrokerConnection

SHARE = 1 / 8  # part of a bound; the next snapshot is due after this growth
LEFT_SHARE = 1 / 2  # part of a new bound; the growth since the newest snapshot must be smaller


@dataclass(frozen=True, slots=True)
class SnapshotPosition:
    """The position of the newest complete snapshot on the journal.

    The snapshot covers the events up to the sequence `through`, and its readers continue after that sequence. `since` is
    the stream's time at `through`.
    """

    through: int
    since: datetime


def due(bounds: JournalBounds, usage: JournalUsage, kept: SnapshotPosition | None) -> bool:
    """Return whether the leader must write the next snapshot.

    If the journal has no bounds, no snapshot is due. With bounds, a snapshot is due when the journal has grown by an eighth of
    any bound since the newest snapshot. Without an earlier snapshot, the first is due when the journal has an event.
    """
    return bool(bounds) and _beyond(bounds, usage, kept, SHARE)


def safe(bounds: JournalBounds, usage: JournalUsage, kept: SnapshotPosition | None) -> bool:
    """Return whether these bounds may be set without the loss of the newest snapshot (`kept`).

    Bounds are safe if the journal has grown by less than half of each bound since that snapshot. Without a snapshot, bounds are
    safe only for an empty journal. Empty bounds are always safe.
    """
    return not bounds or not _beyond(bounds, usage, kept, LEFT_SHARE)


def _beyond(bounds: JournalBounds, usage: JournalUsage, kept: SnapshotPosition | None, share: float) -> bool:
    if kept is None:
        return usage.last_seq > 0
    held = usage.bytes / max(1, usage.last_seq - usage.first_seq + 1)  # bytes per event, on average
    grown = (usage.last_seq - kept.through) * held
    if bounds.bytes is not None and grown >= bounds.bytes * share:
        return True
    return (
        bounds.age is not None
        and usage.last_seq > kept.through
        and usage.at - kept.since >= bounds.age * share
    )


def changed(config: JsonView, bounds: JournalBounds) -> Json | None:
    """Return the stream configuration `config`, changed to these bounds. Return None if `config` already has them."""
    wanted = {
        "max_bytes": bounds.bytes or -1,
        "max_age": round((bounds.age or timedelta(0)).total_seconds() * 1e9),
        "discard": "old" if bounds else "new",
    }
    return None if wanted.items() <= config.items() else {**config, **wanted}


async def bound(connection: BrokerConnection, bounds: JournalBounds) -> bool:
    """Set the stream's bounds. Return False if the stream already has them. Raise JournalUnavailable if the broker does not
    answer or refuses."""
    answer = await ask(connection, f"STREAM.INFO.{subjects.STREAM}")
    config = changed(answer["config"], bounds)
    if config is None:
        return False
    await ask(connection, f"STREAM.UPDATE.{subjects.STREAM}", config)
    return True
