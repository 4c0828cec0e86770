"""Reads the end of a journal, also while its broker restarts."""

from waits import until

from events.journal.nats import NatsJournal
from events.journal.port import JournalUnavailable


async def last_seq(journal: NatsJournal, deadline_s: float = 20.0) -> int:
    """Retry while the connection breaks. Right after the broker was killed it may still appear connected."""
    (last,) = await until(lambda: _last(journal), deadline_s, failing=(JournalUnavailable,))
    return last


async def _last(journal: NatsJournal) -> tuple[int]:
    return (await journal.last_seq(),)
