"""Checks, when `holdfast up` starts, that the broker's journal belongs to this data directory.

Each process stores in a file which event the broker acknowledged last. The database stores the last event that was applied to it.
If the broker lacks such an event, or has another event at that sequence, it has lost events or is a different broker. To continue
would create an inconsistent history. Only the operator can know which history is right, so `up` stops and prints the choices.
"""

import asyncio
import contextlib
import time
from pathlib import Path

from controller.processes.console import print_line, warn
from controller.processes.supervised_servers import FleetDatabase
from controller.runtime.snapshot_publisher import newest_kept
from events.codec import new_id
from events.errors import HoldfastError
from events.journal import bounds
from events.journal.acknowledged import AcknowledgedEvent, lost_since, remembered
from events.journal.nats import NatsJournal
from events.journal.port import JournalChanged, JournalGone, JournalUnavailable
from events.journal.retention import JournalBounds
from events.versions import Known

Place = tuple[int, str]  # a stream sequence and the ce-id of that event


class JournalLost(HoldfastError):
    """The journal lacks events that this fleet has seen. Restore the broker's directory from a backup. Or continue with what the
    journal holds now, with `holdfast up --accept-journal`: the database's rows are then put aside and rebuilt."""


async def open_journal(url: str, spools: Path) -> NatsJournal:
    """Return the supervisor's connection to the journal.

    Raise JournalLost if the journal does not belong to the data directory with the folder `spools`. The stream is created only
    if no process has seen a stream before.
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
    """Raise JournalLost if the stream lacks the last acknowledged event or the database's last event (`place`).

    The last acknowledged event of each process is stored in a file below `spools`, and the newest of these events is checked. Do
    nothing if the broker does not answer, because a missing answer is no proof of a loss.
    """
    with contextlib.suppress(JournalUnavailable):
        newest = max(remembered(spools).values(), key=lambda event: event.seq, default=None)
        if lost := await _lost(journal, newest):
            raise JournalLost(f"{lost}: the broker has lost events, or is another one. {JournalLost.__doc__}")
        if place is not None and (lost := await _lost(journal, AcknowledgedEvent(*place))):
            raise JournalLost(f"the database has folded event {place[0]}, but {lost}. {JournalLost.__doc__}")


async def accept(url: str, spools: Path, database: FleetDatabase, place: Place | None) -> None:
    """Continue with the journal as it is, although this data directory has seen events that the journal lacks.

    Each file below `spools` that stores an acknowledged event is renamed if the journal lacks that event. If the journal lacks
    the last event in the database (`place`), the database's schema is renamed, too.
    """
    journal = await NatsJournal.connect(url, "supervisor:accept", None)
    try:
        last = await journal.last_seq()
        for path, event in remembered(spools).items():
            if await _lost(journal, event):
                path.rename(path.with_suffix(".before"))
        if place is not None and await _lost(journal, AcknowledgedEvent(*place)):
            name = time.strftime("holdfast_before_%Y%m%d_%H%M%S", time.gmtime())
            await database.put_aside(name)
            print_line(f"the projection of the other journal is kept in the database's schema {name}")
        print_line(f"accepted the journal, which holds {last} events")
    finally:
        await journal.close()


async def _lost(journal: NatsJournal, seen: AcknowledgedEvent | None) -> str:
    """Return why the journal does not hold the event `seen`; empty if the journal holds it, or if `seen` is None."""
    if seen is None:
        return ""
    try:
        return await lost_since(journal.connection, seen, await journal.stream_state())
    except JournalGone:
        return f"the stream is missing, although its event {seen.seq} had been read or acknowledged"


LOOK_EVERY_S = 2.0
ASK_S = 5.0


class JournalWatch:
    """Background task that checks, while the fleet runs, that the stream still exists and was not replaced.

    If the stream is missing or was replaced, the task prints a warning.
    """

    def __init__(self, journal: NatsJournal, look_every_s: float = LOOK_EVERY_S) -> None:
        self._journal = journal
        self._look_every_s = look_every_s
        self._reported = ""
        self._task = asyncio.create_task(self._run(), name="journal-watch")

    async def _run(self) -> None:
        created = self._journal.state.created if self._journal.state is not None else ""
        while True:
            await asyncio.sleep(self._look_every_s)
            try:
                async with asyncio.timeout(ASK_S):
                    found = (await self._journal.stream_state()).created
            except JournalGone as error:
                self._report(
                    f"the journal is gone; requests are still served, and each process spools its facts. {error}"
                )
                continue
            except (JournalUnavailable, TimeoutError):
                continue  # the broker is unreachable, which its supervisor reports
            created = created or found
            self._report(
                "" if found == created else f"the journal was replaced: its stream was recreated at {found}"
            )

    def _report(self, words: str) -> None:
        if words == self._reported:
            return
        self._reported = words
        if words:
            warn(words)
        else:
            print_line("the journal is available again")

    async def stop(self) -> None:
        """Stop the background task."""
        self._task.cancel()
        await asyncio.wait({self._task})


BOUND_EVERY_S = 5.0
FORBIDDEN_S = 600.0  # delay of the next attempt if an external broker forbids the change
BOUND_WITHIN_S = 60.0


class JournalBounding:
    """Background task that sets the journal's limits of size and age. At these limits, the broker drops the oldest events.

    The task waits until the events that the broker would retain include a snapshot of the fleet's state. Without a snapshot, the
    state could no longer be computed from the journal.
    """

    def __init__(
        self, journal: NatsJournal, wanted: JournalBounds, look_every_s: float = BOUND_EVERY_S
    ) -> None:
        self._journal = journal
        self._wanted = wanted
        self._look_every_s = look_every_s
        self._warned = False
        self._task = asyncio.create_task(self._run(), name="journal-bounding")

    async def _run(self) -> None:
        wait_s = self._look_every_s
        while wait_s:
            try:
                async with asyncio.timeout(BOUND_WITHIN_S):
                    wait_s = await self._try()
            except (HoldfastError, TimeoutError):
                wait_s = self._look_every_s  # the broker is unreachable, which its supervisor reports
            await asyncio.sleep(wait_s)

    async def _try(self) -> float:
        """Set the limits if the broker would then still retain the newest snapshot of the fleet's state.

        Return the seconds until the next attempt, or 0 if the limits are set.
        """
        usage = await self._journal.usage(growth=False)
        if self._wanted == JournalBounds(usage.bytes_max, usage.age_max):
            return 0.0
        kept = await newest_kept(self._journal) if self._wanted else None
        if not bounds.safe(self._wanted, usage, kept):
            return self._look_every_s
        try:
            changed = await bounds.bound(self._journal.connection, self._wanted)
        except HoldfastError as error:
            if not self._warned and self._journal.connected:
                warn(f"cannot set the journal's bounds, retrying every {FORBIDDEN_S / 60:g} min: {error}")
            self._warned = self._journal.connected
            return FORBIDDEN_S if self._warned else self._look_every_s
        if changed:
            print_line(f"the journal now keeps {words(self._wanted)}")
        return 0.0

    async def stop(self) -> None:
        """Stop the background task."""
        self._task.cancel()
        await asyncio.wait({self._task})


def words(wanted: JournalBounds) -> str:
    """Return a text that says which events a journal with these bounds keeps."""
    limits = [] if wanted.bytes is None else [f"at most {wanted.bytes / (1 << 20):,.0f} MiB"]
    limits += (
        [] if wanted.age is None else [f"events of the last {wanted.age.total_seconds() / 86400:g} days"]
    )
    return " and ".join(limits) or "everything"
