"""Is the journal on the broker the one of this data directory? Asked once, when `holdfast up` starts a fleet.

Its processes remember in files what the broker had acknowledged, and the database remembers what it has folded. A broker
that has neither, or another event in that place, has lost events or is another broker: going on would invent a history. Only
an operator can know which of the two is right, so he is told, with what he can do.
"""

import contextlib
import time
from pathlib import Path

from controller.processes.console import say
from controller.processes.servers.fleet_database import FleetDatabase
from events.codec import new_id
from events.errors import HoldfastError
from events.journal.acknowledged import AcknowledgedEvent, lost_since, remembered
from events.journal.broker import BrokerRefused
from events.journal.nats import NatsJournal
from events.journal.port import JournalChanged, JournalGone, JournalUnavailable
from events.versions import Known

Place = tuple[int, str]  # a stream sequence, and the ce-id of that event


class JournalLost(HoldfastError):
    """Put the broker's directory back from a backup. Or go on from what the journal holds now, with `holdfast up
    --accept-journal`: the database's rows are put aside then, and made anew."""


async def open_journal(url: str, spools: Path) -> NatsJournal:
    """Return the supervisor's own handle on a journal that is the one of this directory. Raise JournalLost.

    Its stream is made if nobody remembers one.
    """
    source = f"supervisor:{new_id()}"
    try:
        journal = await NatsJournal.connect(
            url, source, spools / "supervisor", make=not remembered(spools), known=Known.ours()
        )
    except JournalChanged as error:
        raise JournalLost(f"{error} {JournalLost.__doc__}") from error
    try:
        await refuse_lost(journal, spools)
    except BaseException:
        await journal.close()
        raise
    return journal


async def refuse_lost(journal: NatsJournal, spools: Path, place: Place | None = None) -> None:
    """Raise JournalLost if the stream lacks what was acknowledged, or what the database (its `place`) has folded. A broker that
    does not answer says nothing of either."""
    with contextlib.suppress(JournalUnavailable):
        newest = max(remembered(spools).values(), key=lambda event: event.seq, default=None)
        if lost := await _lost(journal, newest):
            raise JournalLost(f"{lost}: the broker has lost events, or is another one. {JournalLost.__doc__}")
        if place is not None and (lost := await _lost(journal, AcknowledgedEvent(*place))):
            raise JournalLost(f"the database has folded event {place[0]}, but {lost}. {JournalLost.__doc__}")


async def accept(url: str, spools: Path, database: FleetDatabase, place: Place | None) -> None:
    """Take the journal for what it is: forget what is remembered of another one, and put its projection aside."""
    journal = await NatsJournal.connect(url, "supervisor:accept", None)
    try:
        last = await journal.last_seq()
        for path, event in remembered(spools).items():
            if await _lost(journal, event):
                path.rename(path.with_suffix(".before"))
        if place is not None and await _lost(journal, AcknowledgedEvent(*place)):
            name = time.strftime("holdfast_before_%Y%m%d_%H%M%S", time.gmtime())
            await database.put_aside(name)
            say(f"what the database knew of another journal lies in its schema {name}")
        say(f"the journal is accepted as it is: it holds {last} events")
    finally:
        await journal.close()


async def _lost(journal: NatsJournal, seen: AcknowledgedEvent | None) -> str:
    """Return in words what of an event is lost; "" if nothing is."""
    if seen is None:
        return ""
    try:
        return await lost_since(journal.connection, seen, await journal.stream_state())
    except JournalGone:
        return f"there is no stream, of which event {seen.seq} had been read or acknowledged"
    except BrokerRefused as error:
        raise JournalUnavailable(str(error)) from error
