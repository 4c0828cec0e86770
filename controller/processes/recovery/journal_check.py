"""Checks, when `holdfast up` starts, that the broker's journal belongs to this data directory.

Processes store in files which event the broker acknowledged last, and the database stores the last event in its projection. A
broker that lacks such an event, or has another event at that sequence, has lost events or is another broker. Continuing would
create an inconsistent history. Only the operator can know which of the two is right, so `up` stops and prints the choices.
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

Place = tuple[int, str]  # a stream sequence and the ce-id of that event


class JournalLost(HoldfastError):
    """Restore the broker's directory from a backup. Or continue with what the journal holds now, with `holdfast up
    --accept-journal`: the database's rows are then put aside and rebuilt."""


async def open_journal(url: str, spools: Path) -> NatsJournal:
    """Return the supervisor's connection to the journal. Raise JournalLost if it is not the journal of this directory.

    The stream is created if no process has seen one before.
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
    """Raise JournalLost if the stream lacks an acknowledged event, or the last event in the database (`place`). A broker that
    does not answer is no proof of a loss."""
    with contextlib.suppress(JournalUnavailable):
        newest = max(remembered(spools).values(), key=lambda event: event.seq, default=None)
        if lost := await _lost(journal, newest):
            raise JournalLost(f"{lost}: the broker has lost events, or is another one. {JournalLost.__doc__}")
        if place is not None and (lost := await _lost(journal, AcknowledgedEvent(*place))):
            raise JournalLost(f"the database has folded event {place[0]}, but {lost}. {JournalLost.__doc__}")


async def accept(url: str, spools: Path, database: FleetDatabase, place: Place | None) -> None:
    """Accept the journal as it is: delete the records of another journal's acknowledged events, and set its projection aside."""
    journal = await NatsJournal.connect(url, "supervisor:accept", None)
    try:
        last = await journal.last_seq()
        for path, event in remembered(spools).items():
            if await _lost(journal, event):
                path.rename(path.with_suffix(".before"))
        if place is not None and await _lost(journal, AcknowledgedEvent(*place)):
            name = time.strftime("holdfast_before_%Y%m%d_%H%M%S", time.gmtime())
            await database.put_aside(name)
            say(f"the projection of the other journal is kept in the database's schema {name}")
        say(f"accepted the journal, which holds {last} events")
    finally:
        await journal.close()


async def _lost(journal: NatsJournal, seen: AcknowledgedEvent | None) -> str:
    """Return why the journal does not hold the event `seen`, or "" if it does."""
    if seen is None:
        return ""
    try:
        return await lost_since(journal.connection, seen, await journal.stream_state())
    except JournalGone:
        return f"the stream is missing, although its event {seen.seq} had been read or acknowledged"
    except BrokerRefused as error:
        raise JournalUnavailable(str(error)) from error
