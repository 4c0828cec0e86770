"""Dials, accepts and dispatches all channels of one process over one connection to the broker.

A frontend subscribes to the subjects on which workers reply to it. A worker subscribes to one subject on which channels are
dialled. The last token of a subject names the channel.

Messages are processed in the broker connection's read loop. All bytes that one read returns for a channel are delivered in one
piece. The bytes that are sent in one event-loop iteration are written in one piece at its end. Only the request plane uses this
connection, so that a burst of tokens delays neither the journal nor the heartbeats.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable

from events import subjects
from events.nats.channel import DATA, HEAD, OPEN, RESET, TICK_S, Channel, NoResponders
from events.nats.connection import DISCONNECTED, BrokerConnection, BrokerReply

MESSAGE_BYTES_MAX = 64 * 1024  # a longer message would delay the messages of all other channels
FLUSH_S = 1.0
VERSION = b"1"

Make = Callable[[], asyncio.Protocol]


class ChannelListener:
    """Accepts channels on one subject until the listener is closed."""

    def __init__(self, accepted: dict[bytes, Make], subject: bytes) -> None:
        self._accepted, self._subject = accepted, subject

    def close(self) -> None:
        """Accept no more channels. Open channels stay open."""
        self._accepted.pop(self._subject, None)


class Channels:
    """All channels of one process. Implements `events.nats.channel.MessageCarrier`."""

    def __init__(self, connection: BrokerConnection) -> None:
        self.connection = connection
        self._client = connection.client
        self._dials = False
        self._numbers = itertools.count(1)
        self._channels: dict[bytes, Channel] = {}
        self._accepted: dict[bytes, Make] = {}
        self._awake: dict[Channel, None] = {}
        self._flushing = False
        self._due = 0.0
        self._ticking: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, url: str, name: str, *, wait_s: float = 2.0) -> "Channels":
        """Return the channels of this process, over a connection to the broker.

        If the broker is not connected within `wait_s` seconds, the returned object continues to connect in the background.
        Raise BadBrokerUrl if the URL is not valid.
        """
        channels = cls(await BrokerConnection.open(url, name, wait_s=wait_s))
        channels.connection.listen(channels._changed)
        return channels

    @property
    def count(self) -> int:
        """Number of channels that are open or being opened."""
        return len(self._channels)

    async def up(self) -> None:
        """Wait until the broker is connected."""
        await self.connection.up.wait()

    async def close(self) -> None:
        """Send buffered messages, and close the connection to the broker."""
        self._flush()
        if self._ticking is not None:
            self._ticking.cancel()
        await self.connection.close()

    # --- opening channels

    async def dial(self, subject: str, make: Make) -> asyncio.BaseProtocol:
        """Open a channel to the process that listens on `subject`, and return the asyncio protocol of this end. The caller
        must set a timeout.

        `make` creates that protocol. Raise NoResponders if no process listens, or another ConnectionError if the channel
        breaks.
        """
        if not self._dials:
            self._dials = True  # set before the await, because two dials may run at the same time
            await self.connection.subscribe_answers(self._heard)
        number, asker = next(self._numbers), self.connection.asker
        own = subjects.answer(subjects.addressed_worker(subject) or subjects.ANONYMOUS, asker, number)
        channel = Channel(self, own, f"{subject}.{asker.rpartition('.')[2]}-{number}", make)
        self._add(channel)
        self.post(channel.route, HEAD.pack(OPEN, 0, 0), VERSION)
        try:
            await asyncio.wait((channel.answered,))
            return channel.answered.result()
        except BaseException:
            channel.abort()
            raise

    async def listen(self, subject: str, make: Make) -> ChannelListener:
        """Accept channels on this subject, as soon as the broker is connected.

        `make` creates the asyncio protocol of each channel.
        """
        self._accepted[subject.encode()] = make
        await self.connection.subscribe_raw(f"{subject}.*", self._heard)
        if self.connection.connected:
            self._client.write()  # sends the subscription now, because nats-py's ping would overtake it
            with contextlib.suppress(*DISCONNECTED):
                async with asyncio.timeout(FLUSH_S):
                    await self._client.flush()
        return ChannelListener(self._accepted, subject.encode())

    def _add(self, channel: Channel) -> None:
        self._channels[channel.own] = channel
        if self._ticking is None:
            self._due = self._loop.time() + TICK_S
            self._ticking = self._loop.call_at(self._due, self._tick)

    # --- receiving

    def _heard(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        channel = self._channels.get(subject)
        if headers is not None and BrokerReply(body, headers).no_responders:
            if channel is not None:
                channel.end(NoResponders("no responders"))
        elif len(body) >= HEAD.size:
            kind, place, read = HEAD.unpack_from(body)
            if channel is not None:
                channel.receive(kind, place, read, body[HEAD.size :])
            elif OPEN <= kind < RESET:
                self._stranger(kind, subject, reply, body[HEAD.size :])

    def _stranger(self, kind: int, subject: bytes, reply: bytes, payload: bytes) -> None:
        """Process a message for which there is no channel: accept a new channel, or reply with a reset."""
        make = self._accepted.get(subject.rpartition(b".")[0])
        if kind != OPEN or make is None or payload != VERSION or not reply:
            why = "this channel is not open" if kind != OPEN else "no channels are accepted here"
            if reply:
                self.post(b"%b %b " % (reply, subject), HEAD.pack(RESET, 0, 0), why.encode())
            return
        channel = Channel(self, subject.decode(), reply.decode(), make)
        self._add(channel)
        self.post(channel.route, HEAD.pack(DATA, 0, 0), b"")
        channel.begin()

    def _changed(self, connected: bool) -> None:
        if not connected:
            for channel in list(self._channels.values()):
                channel.end(ConnectionResetError("the connection to the broker is lost"))

    def unread(self) -> int:
        """Return the number of bytes that have arrived from the broker and are not read yet. A large number means that this
        process is too slow."""
        return self._client.unread()

    @property
    def taken(self) -> int:
        """Number of bytes that this process has read from the broker so far."""
        return self._client.taken

    # --- sending

    @property
    def payload_max(self) -> int:
        """Largest number of bytes of a channel's stream that fit into one message."""
        return max(1, min(MESSAGE_BYTES_MAX, self._client.max_payload) - HEAD.size)

    def post(self, route: bytes, head: bytes, payload: bytes) -> None:
        """Send a message by the end of this event-loop iteration. If the broker is not connected, the message is lost. All
        channels are closed in that case."""
        self._client.post(route, head, payload)
        self._flush_soon()

    def wake(self, channel: Channel) -> None:
        """Call `channel.turn` by the end of this event-loop iteration."""
        self._awake[channel] = None
        self._flush_soon()

    def forget(self, channel: Channel) -> None:
        """Remove a channel that is closed."""
        self._channels.pop(channel.own, None)
        self._awake.pop(channel, None)

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        awake, self._awake = self._awake, {}
        for channel in awake:
            channel.turn()
        self._client.write()

    def _tick(self) -> None:
        now = self._loop.time()
        late = now - self._due
        self._due, self._ticking = now + TICK_S, None
        for channel in list(self._channels.values()):
            channel.tick(now, late if late > TICK_S else 0.0)
        if self._channels:
            self._ticking = self._loop.call_at(self._due, self._tick)
