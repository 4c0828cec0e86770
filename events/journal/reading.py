"""Read access to the journal: events and stream state. `NatsJournal` adds writing."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from events import subjects
from events.fact import Observation, Recorded
from events.journal import broker, stream
from events.journal.counters import JournalCounters
from events.journal.port import JournalUnavailable, Reopen, StopsAt, StreamEnd
from events.journal.reader import JournalReader
from events.journal.stream import StreamState
from events.journal.usage import JournalUsage, usage
from events.nats.connection import BrokerConnection


class JournalReadAccess:
    """Reads the stream FLEET over one connection."""

    def __init__(self, connection: BrokerConnection) -> None:
        self.counters = JournalCounters()
        self.state: StreamState | None = None  # when we connected
        self.stops_at: StopsAt = "all"
        self.connection = connection

    def read(self, after: int, *, until: int | None = None) -> AsyncGenerator[Sequence[Recorded], None]:
        return self._reader(after, self.stops_at).read(until)

    def inspect(self, after: int, *, until: int) -> AsyncIterator[Sequence[Recorded]]:
        return self._reader(after, "nothing", look_up=True).read(until)

    def reopen(self) -> Reopen:
        return partial(_reopened, self.connection.url, self.connection.name, self.state)

    def _reader(self, after: int, stops_at: StopsAt, *, look_up: bool = False) -> JournalReader:
        created = self.state.created if self.state is not None else None
        return JournalReader(
            self.connection, self.counters, created, after, stops_at=stops_at, look_up=look_up
        )

    async def of_kind(self, kind: type[Observation], after: int = 0) -> AsyncIterator[Recorded]:
        subject = subjects.of_all(kind)
        try:
            while (event := await stream.next_on(self.connection, subject, after)) is not None:
                after = event.seq
                if isinstance(event.fact, kind):
                    yield event
        except broker.BrokerRefused as error:
            raise JournalUnavailable(str(error)) from error

    async def first_seq(self) -> int:
        return max(1, (await self.stream_state()).first_seq)

    async def last_seq(self) -> int:
        return (await self.stream_state()).last_seq

    async def end(self) -> StreamEnd:
        state = await self.stream_state()
        return StreamEnd(state.last_seq, state.at)

    async def stream_state(self) -> StreamState:
        """Return the stream's current state. Raise JournalUnavailable."""
        try:
            return await stream.state(self.connection)
        except broker.BrokerRefused as error:
            raise JournalUnavailable(str(error)) from error

    async def consumer_names(self) -> list[str]:
        """Return the names of the stream's consumers. Raise JournalUnavailable."""
        try:
            return await stream.consumer_names(self.connection)
        except broker.BrokerRefused as error:
            raise JournalUnavailable(str(error)) from error

    async def usage(self, *, growth: bool = True) -> JournalUsage:
        """Return the stream's size on the broker, and with `growth` its growth rate. Raise JournalUnavailable
        (JournalGone: there is no stream)."""
        try:
            return await usage(self.connection, growth=growth)
        except broker.BrokerRefused as error:
            await self.stream_state()  # raises JournalGone if there is no stream
            raise JournalUnavailable(str(error)) from error


@asynccontextmanager
async def _reopened(url: str, name: str, state: StreamState | None) -> AsyncIterator[JournalReadAccess]:
    """Yield read access to the same stream over a new connection."""
    connection = await BrokerConnection.open(url, name)
    try:
        reading = JournalReadAccess(connection)
        reading.state = state
        yield reading
    finally:
        await connection.close()
