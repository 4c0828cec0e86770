"""How large may the journal get, and what must lie in it before its oldest events may go?

    first                    kept        last
      ▼                        ▼           ▼
      ├────────┼────────┼──────┼──────┼────┤
       dropped one day   newest snapshot    an eighth of the bound at most

The broker itself drops the oldest events when the stream reaches a bound. Whoever then begins to fold cannot begin at the
first event any more: so while a stream has bounds, or is to have some, the leading controller says the settled fleet on the
journal (`SnapshotKept`) whenever it has grown by an eighth of them. And a bound is set only when such a snapshot lies in what
it leaves: nothing is dropped that no snapshot stands for.

What a reader would get wrong: if no controller leads for seven eighths of a bound, the newest snapshot is dropped, too. The
state store still has its own; without it nobody could begin.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from events import subjects
from events.journal.broker import ask
from events.journal.usage import JournalUsage
from events.nats.connection import BrokerConnection

SHARE = 1 / 8  # of a bound, after which the next snapshot is due
LEFT_SHARE = 1 / 2  # of a new bound: a snapshot lies in so much of what it leaves
BYTES_MIN = 8 * 1024 * 1024  # a smaller bound would hold little but snapshots
AGE_MIN = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class JournalBounds:
    """What the stream may hold; None: no bound."""

    bytes: int | None = None
    age: timedelta | None = None

    def __bool__(self) -> bool:
        """Say whether there is any."""
        return self.bytes is not None or self.age is not None


@dataclass(frozen=True, slots=True)
class KeptAt:
    """Behind which sequence who begins with the newest whole snapshot reads on, and the stream's time there."""

    through: int
    since: datetime


def due(bounds: JournalBounds, usage: JournalUsage, kept: KeptAt | None) -> bool:
    """Say whether the fleet is to be said again."""
    return bool(bounds) and _beyond(bounds, usage, kept, SHARE)


def safe(bounds: JournalBounds, usage: JournalUsage, kept: KeptAt | None) -> bool:
    """Say whether bounds may be set: what they leave begins before a snapshot, with room to spare."""
    return not bounds or not _beyond(bounds, usage, kept, LEFT_SHARE)


def _beyond(bounds: JournalBounds, usage: JournalUsage, kept: KeptAt | None, share: float) -> bool:
    if kept is None:
        return usage.last_seq > 0
    held = usage.bytes / max(1, usage.last_seq - usage.first_seq + 1)  # an event, on average
    grown = (usage.last_seq - kept.through) * held
    if bounds.bytes is not None and grown >= bounds.bytes * share:
        return True
    return (
        bounds.age is not None
        and usage.last_seq > kept.through
        and usage.at - kept.since >= bounds.age * share
    )


def changed(config: Mapping[str, Any], bounds: JournalBounds) -> dict[str, Any] | None:
    """Return a stream's configuration with these bounds; None if it has them."""
    wanted = {
        "max_bytes": bounds.bytes or -1,
        "max_age": round((bounds.age or timedelta(0)).total_seconds() * 1e9),
        "discard": "old" if bounds else "new",
    }
    return None if wanted.items() <= config.items() else {**config, **wanted}


async def bound(connection: BrokerConnection, bounds: JournalBounds) -> bool:
    """Give the stream these bounds; False: it has them. Raise JournalUnavailable or BrokerRefused."""
    answer = await ask(connection, f"STREAM.INFO.{subjects.STREAM}")
    config = changed(answer["config"], bounds)
    if config is None:
        return False
    await ask(connection, f"STREAM.UPDATE.{subjects.STREAM}", config)
    return True
