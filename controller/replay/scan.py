"""An index by scanning the journal: slower than the store's, but works without a store."""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from controller.read_model.rows import matches
from controller.replay.event_lookup import name
from controller.runtime.bounded_read import held
from events.fact import Recorded
from events.journal.port import Journal


class JournalArchive:
    """Finds events by reading the journal from its beginning."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def locate(self, reference: str) -> int | None:
        """Return the sequence of the event with this ce-id, or of the decision `decision:N`."""
        async for batch in self._all(0):
            for event in batch:
                if reference in (event.id, name(event)):
                    return event.seq
        return None

    async def select(
        self,
        *,
        after: int = 0,
        since: datetime | None = None,
        worker: str | None = None,
        incident: str | None = None,
        request: str | None = None,
    ) -> AsyncIterator[Sequence[Recorded]]:
        """Yield the matching events, in order, in batches."""
        async for batch in self._all(after):
            found = [
                event
                for event in batch
                if matches(event, since=since, worker=worker, incident=incident, request=request)
            ]
            if found:
                yield found

    async def _all(self, after: int) -> AsyncIterator[Sequence[Recorded]]:
        last = await self._journal.last_seq()
        async for batch in held(self._journal, after, last):
            yield batch
