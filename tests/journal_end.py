"""Reads the end of a journal, also while its broker restarts."""

import asyncio

from events.journal.nats import NatsJournal
from events.journal.port import JournalUnavailable


async def last_seq(journal: NatsJournal, deadline_s: float = 20.0) -> int:
    """Retry while the connection breaks. Right after the broker was killed it may still appear connected."""
    async with asyncio.timeout(deadline_s):
        while True:
            try:
                return await journal.last_seq()
            except JournalUnavailable:
                await asyncio.sleep(0.01)
