"""Opens connections to workers through the broker (`--request-plane nats`).

A channel is a connection through the broker. A channel differs from a TCP connection in two ways. First, if the worker no longer
listens, the broker reports this, and requests that the worker has not read count as not sent. Second, all channels of a process
share one socket, which nearly always has unread bytes. `readable` therefore checks whether the bytes that were unread at an
earlier call have been read.
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
SAME_SILENCE_S = 0.5  # maximum time between two calls of `readable` about the same silence
NO_RESPONDERS = "no responders: the worker has gone from the broker"


class ChannelConnection(WorkerConnection):
    """A connection to a worker over a channel through the broker."""

    _channel: Channel | None = None
    _read_to = 0  # position in the broker's byte stream up to which bytes were unread at the first call in this silence
    _asked_at = float("-inf")  # loop time of the last call of `readable`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, Channel)
        self._channel = transport
        # unread requests: end in the sent byte stream, stream number
        self._unread: deque[tuple[int, int]] = deque()
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
        """Return whether this process reads the broker's bytes late, so that the worker must not count as silent.

        True if bytes that were unread at the first check of the present silence are still unread.
        """
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
    """The dialer of workers that are reached through the broker, with URLs of the form `nats:plane.WORKER.INSTANCE`."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    @classmethod
    async def open(cls, broker: str, name: str, *, wait_s: float = 2.0) -> "NatsDialer":
        """Connect to the broker under the name `name`.

        If the broker is not connected within `wait_s` seconds, the returned dialer continues to connect in the background.
        """
        return cls(await Channels.open(broker, f"plane:{name}", wait_s=wait_s))

    async def ready(self) -> None:
        """Wait until the broker is connected, because a broker outage must not count as a failure of workers.

        Raise TimeoutError after 60 s.
        """
        async with asyncio.timeout(READY_S):
            await self._channels.up()

    async def connect(self, url: str, make: Make) -> WorkerConnection:
        """Open a channel to a worker. Raise WorkerUnreachable for an invalid URL, NoResponders if no such worker listens."""
        subject = subjects.plane_of(url)
        if subject is None:
            raise WorkerUnreachable(
                f"{url!r} is not an address of the form {subjects.plane_url('WORKER', 'INSTANCE')}"
            )
        connection = await self._channels.dial(subject, lambda: make(ChannelConnection))
        assert isinstance(connection, WorkerConnection)
        return connection

    async def close(self) -> None:
        """Close the connection to the broker, and every channel over it."""
        await self._channels.close()


@asynccontextmanager
async def dialers(broker: str, name: str) -> AsyncIterator[dict[str, Dialer]]:
    """Yield a mapping with one dialer, which connects through the broker at `broker`, under the URL scheme `nats`.

    If `broker` is empty, the mapping is empty too. Raise BadBrokerUrl if the URL is invalid.
    """
    if not broker:
        yield {}
        return
    dialer = await NatsDialer.open(broker, name)
    try:
        yield {subjects.PLANE_SCHEME: dialer}
    finally:
        await dialer.close()
