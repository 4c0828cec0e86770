"""Selects the part of the journal that is decided again."""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta

from controller.ports import Archive, StateStore
from controller.replay import travel
from controller.replay.timeline import Story
from controller.replay.whatif.reading import in_one, stretches
from controller.replay.whatif.recording import Recording, recorded
from controller.runtime.bounded_read import history
from controller.runtime.initial_fold import oldest, order_from
from events.fact import Recorded
from events.journal.port import Journal

BEFORE = timedelta(seconds=60)  # recorded time that is read before an incident
AFTER = timedelta(minutes=10)  # and after it, because recovery may take longer under another policy


async def of_incident(
    journal: Journal, store: StateStore | None, archive: Archive, story: Story
) -> Recording | None:
    """Read the part around one incident. Raise TooMuch, NoLonger."""
    first, last = story.events[0].at, story.events[-1].at
    return await between(journal, store, archive, first - BEFORE, last + max(AFTER, 2 * (last - first)))


async def between(
    journal: Journal,
    store: StateStore | None,
    archive: Archive,
    since: int | datetime,
    until: int | datetime | None,
) -> Recording | None:
    """Read a part of the journal, both ends included; None if it has no events. Raise TooMuch, NoLonger, NotYet."""
    last = await journal.last_seq()
    first: int | None = since if isinstance(since, int) else None
    if isinstance(since, datetime):
        async for batch in archive.select(since=since):
            first = batch[0].seq
            break
    if first is None or first > last:
        return None
    if isinstance(since, int) and 1 < first <= await journal.first_seq():
        order = order_from(await oldest(journal, first - 1))  # earlier events were dropped
    else:
        order = await travel.order_at(journal, store, max(1, first) - 1)
    end = min(last, until) if isinstance(until, int) else last
    decided = order.position.decided
    if not isinstance(until, datetime):
        return await recorded(order.shown, stretches(journal, order.last_seq, end, decided))
    return await recorded(order.shown, in_one(_until(journal, order.last_seq, end, until), decided))


async def _until(
    journal: Journal, after: int, end: int, until: datetime
) -> AsyncIterator[Sequence[Recorded]]:
    async for batch in history(journal, after, end):
        if batch[-1].at > until:
            yield [event for event in batch if event.at <= until]
            return
        yield batch
