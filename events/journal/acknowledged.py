"""Does the broker still have what it told us it had stored?

The last acknowledgement, in memory and (once a second, and at the end) in a small file beside the spool. A broker
that comes back from a power cut without it, or with another event in its place, has lost acknowledged facts or is
another broker; going on would join two histories. nats-server itself says nothing: it cuts its file at the first
damage and goes on from there.
"""

from pathlib import Path

import msgspec
import structlog

from events.journal import stream
from events.journal.port import JournalChanged
from events.nats.connection import BrokerConnection

ACKNOWLEDGED = "acknowledged.json"

log = structlog.get_logger(__name__)


class AcknowledgedEvent(msgspec.Struct, frozen=True):
    """An event that the broker has acknowledged."""

    seq: int
    id: str


class AcknowledgedPosition:
    """The highest acknowledged event of this process, or of its predecessors on the same directory."""

    def __init__(self, path: Path | None) -> None:
        self.seen: AcknowledgedEvent | None = None
        self._path = path
        self._saved: AcknowledgedEvent | None = None
        if path is not None and path.exists():
            try:
                self.seen = self._saved = msgspec.json.decode(path.read_bytes(), type=AcknowledgedEvent)
            except msgspec.MsgspecError as error:
                log.warning("witness_unreadable", file=str(path), error=str(error))

    def note(self, seq: int, id: str) -> None:
        """Remember an acknowledgement."""
        if self.seen is None or seq > self.seen.seq:
            self.seen = AcknowledgedEvent(seq, id)

    @property
    def unsaved(self) -> bool:
        """Whether there is something to write down."""
        return self._path is not None and self.seen != self._saved

    def save(self) -> None:
        """Write it down, whole or not at all."""
        if self._path is None or self.seen is None or not self.unsaved:
            return
        fresh = self._path.with_suffix(".tmp")
        try:
            fresh.write_bytes(msgspec.json.encode(self.seen))
            fresh.replace(self._path)
        except OSError as error:
            log.warning("witness_not_saved", file=str(self._path), error=str(error))
            return
        self._saved = self.seen

    async def check(
        self, connection: BrokerConnection, seen: AcknowledgedEvent | None, state: stream.StreamState
    ) -> None:
        """Raise JournalChanged if the stream no longer holds what it had acknowledged.

        `seen` is what was seen *before* the state was asked for: acknowledgements may arrive meanwhile.
        """
        if seen is not None and (lost := await lost_since(connection, seen, state)):
            remedy = f" If that is meant, remove {self._path}." if self._path is not None else ""
            raise JournalChanged(f"{lost}: the broker has lost events, or is another broker.{remedy}")


async def lost_since(connection: BrokerConnection, seen: AcknowledgedEvent, state: stream.StreamState) -> str:
    """Return in words why a stream is not the one that held an event; "" if it is, or if that place is dropped."""
    if seen.seq < state.first_seq:
        return ""
    if state.last_seq < seen.seq:
        return f"the stream ends at {state.last_seq}, but the broker had acknowledged event {seen.seq}"
    found = await stream.id_at(connection, seen.seq)
    if found is None or found == seen.id:
        return ""
    return f"event {seen.seq} was acknowledged as {seen.id} and is now {found}"


def remembered(spools: Path) -> dict[Path, AcknowledgedEvent]:
    """Return what the processes of one data directory remember, by file; those below `spools` that can be read."""
    found = {}
    for path in sorted(spools.glob(f"*/{ACKNOWLEDGED}")):
        seen = AcknowledgedPosition(path).seen
        if seen is not None:
            found[path] = seen
    return found
