"""Connections to workers through the broker: `--request-plane nats`.

A connection over a channel differs from a TCP connection in two ways. If the worker no longer listens, a request that it never
read has found no responder, and counts as not sent. And all channels share one socket, which nearly always has unread bytes: so
`readable` checks whether the bytes that were unread a moment ago have been read.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from controller.adapters.request_plane.connection import WorkerConnection
from controller.adapters.request_plane.dialers import Dialer, Make
from controller.ports import Sink, WorkerUnreachable
from events import subjects
from events.nats.channel import Channel, NoResponders
from events.nats.channels import Channels
from events.wire import Generate

READY_S = 60.0
SAME_SILENCE_S = 0.5  # two calls within this time concern the same silence
NO_RESPONDERS = "no responders: the worker has gone from the broker"


class ChannelConnection(WorkerConnection):
    """A connection over a channel."""

    _channel: Channel | None = None
    _read_to = 0  # end of the broker's bytes unread at the first call in this silence
    _asked_at = float("-inf")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, Channel)
        self._channel = transport
        self._unread: deque[tuple[int, int]] = deque()  # per request: end in our byte stream, stream
        super().connection_made(transport)

    def open(self, stream: int, request: Generate, sink: Sink) -> None:
        super().open(stream, request, sink)
        channel, unread = self._channel, self._unread
        assert channel is not None
        while unread and unread[0][0] <= channel.outgoing.acknowledged:
            unread.popleft()
        unread.append((channel.outgoing.written, stream))

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, NoResponders) and self._channel is not None:
            self._transport = None
            for end, stream in self._unread:
                sink = self._sinks.pop(stream, None) if end > self._channel.outgoing.acknowledged else None
                if sink is not None:
                    self.detector.closed()
                    sink.lost("cannot_connect", NO_RESPONDERS)
        super().connection_lost(exc)

    def readable(self) -> bool:
        """Return whether bytes that were unread at the first call in this silence are still unread."""
        if self._channel is None:
            return False
        broker, now = self._channel.carrier, self._loop.time()
        fresh = now - self._asked_at > SAME_SILENCE_S
        self._asked_at = now
        if not (unread := broker.unread()):
            return False
        if fresh:
            self._read_to = broker.taken + unread
        return broker.taken < self._read_to


class NatsDialer:
    """Connects to a worker's subject on the broker."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    @classmethod
    async def open(cls, broker: str, name: str, *, wait_s: float = 2.0) -> "NatsDialer":
        """Connect to the broker within `wait_s`, else keep trying in the background."""
        return cls(await Channels.open(broker, f"plane:{name}", wait_s=wait_s))

    async def ready(self) -> None:
        """Wait until the broker is connected: while it is unavailable, no worker has failed."""
        async with asyncio.timeout(READY_S):
            await self._channels.up()

    async def connect(self, url: str, make: Make) -> WorkerConnection:
        """Open a channel. Raise NoResponders if there is no such worker."""
        subject = subjects.plane_of(url)
        if subject is None:
            raise WorkerUnreachable(
                f"{url!r} is not an address of the form {subjects.plane_url('WORKER', 'INSTANCE')}"
            )
        connection = await self._channels.dial(subject, lambda: make(ChannelConnection))
        assert isinstance(connection, WorkerConnection)
        return connection

    async def close(self) -> None:
        """Close the broker connection, and every connection over it."""
        await self._channels.close()


@asynccontextmanager
async def dialers(broker: str, name: str) -> AsyncIterator[dict[str, Dialer]]:
    """Yield a dialer through the broker at this URL, by URL scheme; none for an empty URL. Raise BadBrokerUrl."""
    if not broker:
        yield {}
        return
    dialer = await NatsDialer.open(broker, name)
    try:
        yield {subjects.PLANE_SCHEME: dialer}
    finally:
        await dialer.close()
