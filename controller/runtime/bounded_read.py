"""Journal reads and waits that end after a time limit.

A follower of the journal waits for the broker without limit. A query ends with an error if the journal does not answer in time.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from controller.ports import Clock
from events.fact import Recorded
from events.journal.port import Journal, JournalReads, JournalUnavailable

PATIENCE_S = 30.0  # longest wait for the next journal events, which are known to exist


async def pause(changed: asyncio.Event, clock: Clock, seconds: float) -> None:
    """Wait until `changed` is set, but at most `seconds` by this clock."""
    waits = [asyncio.ensure_future(one) for one in (changed.wait(), clock.sleep(seconds))]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waits:
            one.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def history(journal: JournalReads, after: int, until: int) -> AsyncIterator[Sequence[Recorded]]:
    """Yield lists of the journal's events after sequence `after` up to and including `until`.

    Raise JournalUnavailable if no event arrives for PATIENCE_S.
    """
    if until > after:
        async for batch in patient(journal.read(after, until=until), after, until):
            yield batch


async def held(journal: Journal, after: int, until: int) -> AsyncIterator[Sequence[Recorded]]:
    """Yield lists of events like `history`, but skip the events that the journal has dropped.

    Raise JournalUnavailable if the journal does not answer.
    """
    async for batch in history(journal, max(after, await journal.first_seq() - 1), until):
        yield batch


async def patient(
    batches: AsyncIterator[Sequence[Recorded]], after: int, until: int
) -> AsyncIterator[Sequence[Recorded]]:
    """Yield the event lists of `batches`, each of which must arrive within PATIENCE_S.

    `batches` reads the journal's events after sequence `after`, up to and including `until`. Raise JournalUnavailable if a list
    does not arrive in time. The error's text names both sequences.
    """
    while True:
        try:
            async with asyncio.timeout(PATIENCE_S):
                batch = await anext(batches, None)
        except TimeoutError:
            raise JournalUnavailable(
                f"the journal was read to {after} of {until}, then delivered no event for {PATIENCE_S:g} s"
            ) from None
        if batch is None:
            return
        yield batch
        after = batch[-1].seq if batch else after
