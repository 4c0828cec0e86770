"""Where a journal ends, also while its broker comes and goes."""

import asyncio

from events.journal.nats import NatsJournal
from events.journal.port import JournalUnavailable


async def last_seq(journal: NatsJournal, deadline_s: float = 20.0) -> int:
    """Ask as often as the connection breaks. It still stands, as far as anybody knows, right after its broker was killed."""
    async with asyncio.timeout(deadline_s):
        while True:
            try:
                return await journal.last_seq()
            except JournalUnavailable:
                await asyncio.sleep(0.01)
