"""What the journal holds, up to a known end. A follower waits for the broker for ever; whoever was asked a question
says that it does not answer."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from events.fact import Recorded
from events.journal.port import Journal, JournalReads, JournalUnavailable

PATIENCE_S = 30.0  # for the next batch of what is known to be there


async def history(journal: JournalReads, after: int, until: int) -> AsyncIterator[Sequence[Recorded]]:
    """Yield the events above `after` up to `until`, in batches. Raise JournalUnavailable if no more of them comes."""
    if until > after:
        async for batch in patient(journal.read(after, until=until), after, until):
            yield batch


async def held(journal: Journal, after: int, until: int) -> AsyncIterator[Sequence[Recorded]]:
    """Yield as `history` does what the journal still holds of that. Raise JournalUnavailable."""
    async for batch in history(journal, max(after, await journal.first_seq() - 1), until):
        yield batch


async def patient(
    batches: AsyncIterator[Sequence[Recorded]], after: int, until: int
) -> AsyncIterator[Sequence[Recorded]]:
    """Yield what a reading from `after` to `until` gives. Raise JournalUnavailable if no more of it comes."""
    while True:
        try:
            async with asyncio.timeout(PATIENCE_S):
                batch = await anext(batches, None)
        except TimeoutError:
            raise JournalUnavailable(
                f"the journal has been read to {after} of {until} and gave nothing more for {PATIENCE_S:g} s"
            ) from None
        if batch is None:
            return
        yield batch
        after = batch[-1].seq if batch else after
