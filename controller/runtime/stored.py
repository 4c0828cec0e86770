"""What does the fleet's memory take, and for how long is there room? For `holdfast status`: the journal on the broker, and the
spools of the processes on this host, where facts wait for it.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from events.errors import HoldfastError
from events.journal.port import JournalGone
from events.journal.spool import BYTES_MAX, SUFFIX
from events.journal.usage import JournalUsage

ASK_S = 1.0


class StoredStatus:
    """Asks the broker and the disk when somebody wants to know."""

    def __init__(self, usage: Callable[[], Awaitable[JournalUsage]], data: Path) -> None:
        self._usage = usage
        self._data = data

    async def describe(self) -> dict[str, dict[str, Any]]:
        """Return `journal` and `spool` as plain JSON values; None stands for what cannot be known now."""
        found: JournalUsage | None = None
        fault = None
        try:
            async with asyncio.timeout(ASK_S):
                found = await self._usage()
        except JournalGone as error:
            fault = str(error)
        except (HoldfastError, TimeoutError):
            pass  # the broker is away: `last_seq` says so already
        held, free = await asyncio.to_thread(self._disk)
        journal = {"fault": fault, **_journal(found, free)}
        return {"journal": journal, "spool": {"bytes": held, "bytes_max_each": BYTES_MAX}}

    def _disk(self) -> tuple[int, int | None]:
        """Return how much the spools hold, and what is free where the broker keeps its files, if that is here."""
        held = sum(path.stat().st_size for path in self._data.glob(f"spool/*/*{SUFFIX}"))
        broker = self._data / "nats"
        return held, shutil.disk_usage(broker).free if broker.is_dir() else None


def _journal(found: JournalUsage | None, free: int | None) -> dict[str, Any]:
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
