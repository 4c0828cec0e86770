"""Detects a broker that has lost acknowledged events, or that is another broker.

The last acknowledged event is kept in memory. Once a second, and at the end of the process, it is saved to a small file beside
the spool. If the stream ends before that event, or holds another event at its position, the broker has lost acknowledged facts
or is another broker. Writing to this broker would join two histories. A power failure can cause such a loss. nats-server does not
report the loss: the server truncates its file at the first damage and continues there.
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
    """An event that the broker has acknowledged: its stream sequence and its id."""

    seq: int
    id: str


class AcknowledgedPosition:
    """The last event that the broker acknowledged to this process, or to earlier processes with the same directory."""

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
        """Record that the broker acknowledged the event `id` at sequence `seq`."""
        if self.seen is None or seq > self.seen.seq:
            self.seen = AcknowledgedEvent(seq, id)

    @property
    def unsaved(self) -> bool:
        """Whether the position in memory is newer than the position in the file."""
        return self._path is not None and self.seen != self._saved

    def save(self) -> None:
        """Save the position to its file, atomically. If the file cannot be written, log a warning."""
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
        """Raise JournalChanged if the stream ends before the event `seen`, or has another event at `seen.seq`.

        Read `seen` before you request `state`. If `seen` were read later, it could be newer than `state`, and the check would
        raise although no event is lost.
        """
        if seen is not None and (lost := await lost_since(connection, seen, state)):
            remedy = f" If this is intended, remove {self._path}." if self._path is not None else ""
            raise JournalChanged(f"{lost}: the broker has lost events, or is another broker.{remedy}")


async def lost_since(connection: BrokerConnection, seen: AcknowledgedEvent, state: stream.StreamState) -> str:
    """Return why a stream is not the one that held the event `seen`, as text for an error.

    Return "" if the event is at its position. Also return "" if the stream has dropped the event, because another stream could
    then not be detected.
    """
    if seen.seq < state.first_seq:
        return ""
    if state.last_seq < seen.seq:
        return f"the stream ends at {state.last_seq}, but the broker had acknowledged event {seen.seq}"
    found = await stream.id_at(connection, seen.seq)
    if found is None or found == seen.id:
        return ""
    return f"event {seen.seq} was acknowledged as {seen.id} and is now {found}"


def remembered(spools: Path) -> dict[Path, AcknowledgedEvent]:
    """Return the saved positions of all processes with a folder in `spools`, by file. Omit unreadable files."""
    found = {}
    for path in sorted(spools.glob(f"*/{ACKNOWLEDGED}")):
        seen = AcknowledgedPosition(path).seen
        if seen is not None:
            found[path] = seen
    return found
