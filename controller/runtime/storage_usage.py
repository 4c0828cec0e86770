"""Reports the size and free space of the journal and the spools, for `holdfast status` and metrics.

The journal is on the broker. A spool is a file of a process on this host, in which facts wait for the broker.

What the broker does at the journal's size limit was set when the stream was created. If the broker drops the oldest events
(once a snapshot covers them), the journal is full only when the disk is full. If the broker refuses new messages, the journal is
full as soon as it reaches the limit.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from controller.ports import Clock
from events.errors import HoldfastError
from events.journal.port import JournalGone
from events.journal.spool import BYTES_MAX, SUFFIX
from events.journal.usage import JournalUsage

ASK_S = 1.0
LOOK_S = 15.0
DAY_S = 86_400.0


async def describe(usage: Callable[[], Awaitable[JournalUsage]], data: Path) -> dict[str, dict[str, object]]:
    """Return the parts `journal` and `spool` of `holdfast status` as plain JSON values, read from broker and disk.

    A value is None if it is unknown now.
    """
    found: JournalUsage | None = None
    fault = None
    try:
        async with asyncio.timeout(ASK_S):
            found = await usage()
    except JournalGone as error:
        fault = str(error)
    except (HoldfastError, TimeoutError):
        pass  # the broker is unavailable, which the status already shows by its `last_seq`
    held, free = await asyncio.to_thread(_disk, data)
    journal = {"fault": fault, **_journal(found, free)}
    return {"journal": journal, "spool": {"bytes": held, "bytes_max_each": BYTES_MAX}}


def _disk(data: Path) -> tuple[int, int | None]:
    """Return the total bytes of the spools, and the free bytes on the broker's disk (None if it is on another host)."""
    return sum(path.stat().st_size for path in data.glob(f"spool/*/*{SUFFIX}")), free_bytes(data)


@dataclass(eq=False)
class JournalRoom:
    """Polls the journal's size and free space for the metrics, because a query can exceed the time limit of a scrape."""

    usage: Callable[[], Awaitable[JournalUsage]]
    data: Path
    clock: Clock
    look_s: float = LOOK_S

    def __post_init__(self) -> None:
        self.known: Mapping[str, float | None] = room(None, None)

    async def run(self) -> None:
        """Poll every `look_s` until cancelled. While the broker is unavailable, the values from the broker are None."""
        while True:
            free = await asyncio.to_thread(free_bytes, self.data)
            try:
                async with asyncio.timeout(ASK_S):
                    self.known = room(await self.usage(), free)
            except (HoldfastError, TimeoutError):
                self.known = room(None, free)
            await self.clock.sleep(self.look_s)


def free_bytes(data: Path) -> int | None:
    """Return the free bytes on the broker's disk; None if the broker's data is not on this host."""
    broker = data / "nats"
    return shutil.disk_usage(broker).free if broker.is_dir() else None


def room(found: JournalUsage | None, free: int | None) -> dict[str, float | None]:
    """Return the values of the journal's metrics by name. `free` is the number of free bytes on the broker's disk.

    A value is None if it is unknown or does not apply.
    """
    return {
        "journal_bytes": None if found is None else found.bytes,
        "journal_max_bytes": None if found is None else found.bytes_max,
        "journal_free_bytes": free,
        "journal_full_in_seconds": None if found is None else _full_in_s(found, free),
    }


def _full_in_s(found: JournalUsage, free: int | None) -> float | None:
    left = None if found.bytes_max is None else max(0, found.bytes_max - found.bytes)
    if left is not None and not found.refuses and (free is None or left <= free):
        return None  # such a journal never gets full, because its oldest events are dropped
    rooms = [one for one in (left if found.refuses else None, free) if one is not None]
    return min(rooms) / found.bytes_a_day * DAY_S if rooms and found.bytes_a_day else None


def _journal(found: JournalUsage | None, free: int | None) -> dict[str, object]:
    if found is None:
        return dict.fromkeys(("first_seq", "bytes", "bytes_max", "age_max_s", "bytes_a_day", "days_left"))
    room = found.bytes_max - found.bytes if found.bytes_max is not None else free
    days = None if room is None or not found.bytes_a_day else max(0.0, room / found.bytes_a_day)
    return {
        "first_seq": found.first_seq,
        "bytes": found.bytes,
        "bytes_max": found.bytes_max,
        "age_max_s": None if found.age_max is None else found.age_max.total_seconds(),
        "bytes_a_day": None if found.bytes_a_day is None else round(found.bytes_a_day),
        "days_left": None if days is None else round(days, 1),
    }
