"""Reads the stream: every event once, in order, forever, as fast as the events can be decoded.

The reader uses one ephemeral pull consumer without acknowledgements or filter. It sends the next request before the messages of
the last request are used up. If a restarted broker no longer has the consumer, or if a route is lost, no message arrives.
So the broker sends idle heartbeats. If they stop, the reader creates a new consumer that starts after the last event read. If
the broker now holds another event at the position of the last event read, it lost acknowledged events or has another stream.
Reading on would mix two histories, so the reader raises JournalChanged.

Messages that are not events of Holdfast are skipped (`events.journal.messages`). An operator can quarantine an event by a message
on the stream, and every reader then skips that event. In two cases the reader asks the broker whether an event is quarantined.
The first case is an event that may be from a newer version, at which the reader would stop. The second is an event for which the
stream has a message on the subject of its quarantine.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog

from events import codec, subjects
from events.fact import Observation, Recorded, Skipped
from events.journal import messages, stream
from events.journal.broker import API, BrokerRefused, ask, delivered, parse_headers
from events.journal.counters import JournalCounters
from events.journal.port import JournalChanged, JournalDropped, JournalUnavailable, Reopen, StopsAt, StreamEnd
from events.journal.stream import StreamState
from events.journal.usage import JournalUsage, usage
from events.nats.connection import DISCONNECTED, BrokerConnection, Interest

REQUEST = 2000  # events per request
LOW = REQUEST // 2  # the next request is sent at this number of outstanding events
BATCH_MAX = 1000  # most events in one yielded list
HEARTBEAT_S = 1.0
SILENCE_S = 2.5
EXPIRES_S = 60.0
FORGOTTEN_AFTER_S = 30.0  # the broker deletes a consumer without requests after this time
RETRY_S = 0.1

UNANSWERED: tuple[type[Exception], ...] = (JournalUnavailable, *DISCONNECTED)
_names = itertools.count(1)

log = structlog.get_logger(__name__)


@dataclass
class _Inbox:
    """The messages that have arrived and are not decoded yet. `stale` is the reason why a new consumer is needed, or empty."""

    waiting: list[tuple[bytes, bytes, bytes, bytes | None]] = field(default_factory=list)
    flag: asyncio.Event = field(default_factory=asyncio.Event)
    outstanding: int = 0  # events that were requested and have not arrived
    stale: str = ""

    def take(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        """Add an arrived message, or process the broker's status message about the reader's last request for messages. Called
        in the connection's read loop."""
        if reply.startswith(b"$JS.ACK"):
            self.waiting.append((subject, reply, data, headers))
            self.outstanding -= 1
        else:
            status = parse_headers(headers)
            # the request has ended, and its remaining events will not arrive
            if status.get("Status") in ("404", "408"):
                self.outstanding -= int(status.get("Nats-Pending-Messages", REQUEST))
            elif status.get("Status") != "100":
                self.stale = f"{status.get('Status')} {status.get('Description', '')}"
        self.flag.set()


class JournalReader:
    """Reads the events of the stream after a given position, each exactly once and in order."""

    def __init__(
        self,
        connection: BrokerConnection,
        counters: JournalCounters,
        created: str | None,
        after: int,
        *,
        stops_at: StopsAt,
        look_up: bool = False,
    ) -> None:
        """Prepare to read the events after the sequence `after`.

        `created` is the creation time of the stream that must be read. None accepts the first stream that is found.

        With `look_up`, ask the broker about the quarantine of every event that may be from a newer version of Holdfast. This
        includes events at which this reader does not stop.
        """
        self._connection = connection
        self._counters = counters
        self._created = created
        self._after = after
        self._last_id = ""  # id of the event at `after`, if this reader has read that event
        self._inbox = _Inbox()
        self._interest: Interest | None = None
        self._gap_at = -1  # position after which an event was missing
        self._stops_at = stops_at
        self._looks_up: StopsAt = "all" if look_up else stops_at
        self._perhaps_quarantined: frozenset[int] = frozenset()  # sequences with a quarantine message
        self._quarantines: dict[int, Recorded | None] = {}  # results of look-ups, by sequence
        self._address = ""
        self._consumer = ""

    async def read(self, until: int | None) -> AsyncGenerator[Sequence[Recorded], None]:
        """Yield lists of events, up to the sequence `until` or forever.

        Raise UnknownKind at an event that this reader needs and cannot decode. Raise JournalChanged if the stream was replaced
        or has lost events, or JournalDropped if its bounds dropped the next events.
        """
        self._connection.listen(self._connection_changed)
        try:
            while until is None or self._after < until:
                await self._renew()
                while not self._inbox.stale:
                    await self._top_up()
                    batch, doubtful = self._decode(until)
                    if batch:
                        yield batch
                        if until is not None and self._after >= until:
                            return
                    elif doubtful:
                        await self._look_up(doubtful)
                    else:
                        await self._wait()
                log.info("reader_resumes", after=self._after, why=self._inbox.stale)
        finally:
            self._connection.unlisten(self._connection_changed)
            await self._leave()

    # --- the consumer -------------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Create a consumer that continues at the current position, and retry until this succeeds.

        Raise JournalChanged if the stream is no longer the one that was read, or JournalDropped if the next events are gone.
        """
        while True:
            try:
                await self._leave()
                await self._check()
                await self._create()
                return
            except UNANSWERED as error:
                log.debug("reader_waits", after=self._after, why=str(error))
                await asyncio.sleep(RETRY_S if self._connection.connected else 0)
                await self._connection.up.wait()

    async def _check(self) -> None:
        found = await stream.state(self._connection)
        self._perhaps_quarantined = found.quarantined
        if self._created is None:
            self._created = found.created
        if found.created != self._created:
            raise JournalChanged(f"the stream was recreated at {found.created}. {JournalChanged.__doc__}")
        if found.last_seq < self._after:
            raise JournalChanged(
                f"the stream ends at {found.last_seq}, but {self._after} has been read. {JournalChanged.__doc__}"
            )
        if found.first_seq > self._after + 1:
            raise JournalDropped(
                f"the stream begins at {found.first_seq}: the events after {self._after} are gone. {JournalDropped.__doc__}"
            )
        if self._last_id:
            await self._check_last()

    async def _check_last(self) -> None:
        found = await stream.id_at(self._connection, self._after)
        # None: the event was dropped at the operator's retention bounds
        if found is not None and found != self._last_id:
            raise JournalChanged(
                f"event {self._after} was {self._last_id} and is now {found or 'another'}: the broker has lost "
                f"events that it had acknowledged. {JournalChanged.__doc__}"
            )

    async def _create(self) -> None:
        self._inbox = _Inbox()
        name = f"reader{next(_names)}-{codec.new_id()[-12:]}"  # the form of the name shows the version: 0.2.0 uses r1-…
        config = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._after + 1,
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "max_waiting": 16,
            "inactive_threshold": int(FORGOTTEN_AFTER_S * 1e9),
        }
        self._address = self._connection.new_inbox()
        self._interest = await self._connection.subscribe_raw(self._address, self._inbox.take)
        body = {"stream_name": subjects.STREAM, "config": config, "action": "create"}
        await ask(self._connection, f"CONSUMER.CREATE.{subjects.STREAM}.{name}", body)
        self._consumer = name
        await self._request()

    async def _request(self) -> None:
        body = {
            "batch": REQUEST,
            "expires": int(EXPIRES_S * 1e9),
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
        }
        self._inbox.outstanding += REQUEST
        client = self._connection.client
        await client.publish(
            f"{API}.CONSUMER.MSG.NEXT.{subjects.STREAM}.{self._consumer}",
            msgspec.json.encode(body),
            self._address,
        )

    async def _leave(self) -> None:
        """Delete the current consumer if the broker is reachable."""
        interest, self._interest = self._interest, None
        consumer, self._consumer = self._consumer, ""
        if interest is not None:
            await interest.cancel()
        if consumer and self._connection.connected:
            try:
                subject = f"{API}.CONSUMER.DELETE.{subjects.STREAM}.{consumer}"
                client = self._connection.client
                await client.publish(subject, b"")
            except DISCONNECTED:
                # the broker deletes an unused consumer after 30 s
                log.debug("consumer_left_behind", consumer=consumer)

    def _connection_changed(self, connected: bool) -> None:
        self._inbox.stale = "reconnected" if connected else "disconnected"
        self._inbox.flag.set()

    # --- arriving messages --------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Wait until a message arrives. If none arrives within 2.5 s, mark the consumer as stale."""
        inbox = self._inbox
        if inbox.waiting:
            return
        inbox.flag.clear()
        try:
            async with asyncio.timeout(SILENCE_S):
                await inbox.flag.wait()
        except TimeoutError:
            if not inbox.flag.is_set():
                inbox.stale = inbox.stale or "silent"

    async def _top_up(self) -> None:
        """Request more events before the last request is used up, unless many arrived events still wait for the caller."""
        inbox = self._inbox
        if inbox.outstanding > LOW or len(inbox.waiting) > REQUEST:
            return
        try:
            await self._request()
        except DISCONNECTED as error:
            inbox.stale = inbox.stale or repr(error)

    def _gap(self, seq: int) -> None:
        """Mark the consumer as stale, so that a new consumer reads again from the current position.

        Raise JournalChanged if the same gap was found before, because then the broker itself lacks the event.
        """
        if self._gap_at == self._after:
            raise JournalChanged(
                f"event {self._after + 1} cannot be read: the broker continues with {seq}, and has lost or removed it"
            )
        self._gap_at = self._after
        self._inbox.waiting.clear()
        self._inbox.stale = self._inbox.stale or f"gap: {seq} follows {self._after}"

    async def _look_up(self, seq: int) -> None:
        """Query the broker whether the event at this sequence is quarantined, and store the result."""
        try:
            self._quarantines[seq] = await stream.quarantine(self._connection, seq)
        except UNANSWERED as error:
            self._inbox.stale = self._inbox.stale or repr(error)

    def _decode(self, until: int | None) -> tuple[list[Recorded], int]:
        """Decode the arrived messages, up to `until`, and check them for gaps.

        Return the events. Also return the sequence of the next message if the broker must first be asked whether that message
        is quarantined, else 0. Raise UnknownKind at an event at which this reader must stop.
        """
        inbox = self._inbox
        taken, inbox.waiting = inbox.waiting[:BATCH_MAX], inbox.waiting[BATCH_MAX:]
        events: list[Recorded] = []
        for place, (subject, reply, body, raw) in enumerate(taken):
            seq, at = delivered(reply)
            if seq != self._after + 1:
                self._gap(seq)
                break
            if until is not None and seq > until:
                break
            event = messages.read(seq, at, subject, raw, body)
            id = event.id
            if event.fact.__class__ is Skipped or seq in self._perhaps_quarantined:
                judged = self._judge(event, messages.place_id(subject, body))
                if judged is None:
                    # the events before this one are yielded first
                    inbox.waiting = taken[place:] + inbox.waiting
                    return events, seq
                event, id = judged, parse_headers(raw).get("ce-id", "")
            events.append(event)
            self._after, self._last_id = seq, id
        return events, 0

    def _judge(self, event: Recorded, id: str) -> Recorded | None:
        """Return the event to yield, or the `Skipped` that replaces it. Return None if the event's quarantine must be queried
        first.

        Raise UnknownKind if this reader must stop at the event.
        """
        seq, unknown = event.seq, messages.stops_reader(event, self._looks_up)
        if (unknown or seq in self._perhaps_quarantined) and seq not in self._quarantines:
            return None
        if (by := self._quarantines.get(seq)) is not None:
            event = messages.quarantined_event(event, by, id)
        elif messages.stops_reader(event, self._stops_at):
            raise messages.stops(event)
        self._counters.note(event)
        return event


class JournalReadAccess:
    """Read access to the events and the state of the stream FLEET, over one connection. The subclass `NatsJournal` adds
    writing."""

    def __init__(self, connection: BrokerConnection) -> None:
        self.counters = JournalCounters()
        self.state: StreamState | None = None  # the stream's state when this process connected
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
        while (event := await stream.next_on(self.connection, subject, after)) is not None:
            after = event.seq
            if isinstance(event.fact, kind):
                yield event

    async def first_seq(self) -> int:
        return max(1, (await self.stream_state()).first_seq)

    async def last_seq(self) -> int:
        return (await self.stream_state()).last_seq

    async def end(self) -> StreamEnd:
        state = await self.stream_state()
        return StreamEnd(state.last_seq, state.at)

    async def stream_state(self) -> StreamState:
        """Return the stream's current state, as the broker reports it. Raise JournalUnavailable if the broker does not answer."""
        return await stream.state(self.connection)

    async def consumer_names(self) -> list[str]:
        """Return the names of the stream's consumers. Raise JournalUnavailable if the broker does not answer."""
        return await stream.consumer_names(self.connection)

    async def usage(self, *, growth: bool = True) -> JournalUsage:
        """Return the stream's size on the broker and, if `growth` is set, its growth rate.

        Raise JournalUnavailable if the broker does not answer, or its subclass JournalGone if the broker has no stream.
        """
        try:
            return await usage(self.connection, growth=growth)
        except BrokerRefused:
            await self.stream_state()  # raises JournalGone if the broker has no stream
            raise


@asynccontextmanager
async def _reopened(url: str, name: str, state: StreamState | None) -> AsyncIterator[JournalReadAccess]:
    """Yield read access over a new connection, for another process. `state` describes the stream that must be read."""
    connection = await BrokerConnection.open(url, name)
    try:
        reading = JournalReadAccess(connection)
        reading.state = state
        yield reading
    finally:
        await connection.close()
