"""Dialers of worker connections: `TcpDialer` dials a worker's port, `nats_dialer` the broker.

All frames of a busy loop turn for one worker leave as one write. Each write is a system call and wakes the worker, which
would otherwise read one request although ten are on their way.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from controller.adapters.request_plane.connection import WorkerConnection
from controller.ports import WorkerUnreachable

PORT_S = 1.0  # timeout of a port probe: the kernel accepts, even for a process that hangs

Make = Callable[[type[WorkerConnection]], WorkerConnection]
"""Creates a connection of the class that the dialer needs."""


class Dialer(Protocol):
    """Opens one kind of connection."""

    async def ready(self) -> None:
        """Wait until connections are possible at all. Raise TimeoutError."""
        ...

    async def connect(self, url: str, make: Make) -> WorkerConnection:
        """Return a new connection; the caller sets the deadline. Raise OSError or WorkerUnreachable."""
        ...


class CoalescingTransport(asyncio.Transport):
    """A transport that joins the writes of one loop turn, in order, into one system call and one wake-up of the worker.

    At full load with 64 users, five writes to a worker become one system call. Where turns write once each, nothing is delayed:
    the first write of a turn is sent at once, unless the last turn with writes had several.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._writes = 0  # writes in this turn
        self._busy = False  # the last turn with writes had several
        self._gathered: list[bytes | bytearray | memoryview] = []
        self._bytes = 0  # in `_gathered`
        self.is_closing = transport.is_closing  # type: ignore[method-assign]  # called for every request

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._writes += 1
        if self._writes == 1:
            self._loop.call_soon(self._end_turn)
            if not self._busy:
                self._transport.write(data)
                return
        self._gathered.append(data)
        self._bytes += len(data)

    def _end_turn(self) -> None:
        """End the turn: write what has gathered, or nothing if the connection is gone."""
        self._busy, self._writes = self._writes > 1, 0
        self._flush()

    def _flush(self) -> None:
        data, self._bytes = b"".join(self._gathered), 0
        self._gathered.clear()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        return self._bytes + self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


class TcpConnection(WorkerConnection):
    """A connection to a worker's own port."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is not a subclass
        super().connection_made(CoalescingTransport(cast(asyncio.Transport, transport)))


class TcpDialer:
    """Connects to a worker's own port: `tcp://host:port`."""

    async def ready(self) -> None:
        """Return at once: TCP has no prerequisite."""

    async def connect(self, url: str, make: Make) -> WorkerConnection:
        """Connect to the port. Raise OSError, or WorkerUnreachable for an invalid URL."""
        host, port = _endpoint(url)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: make(TcpConnection), host, port)
        return connection


async def port_open(url: str) -> bool:
    """Return whether a process listens at an address, `tcp://host:port`; False for an invalid one."""
    try:
        async with asyncio.timeout(PORT_S):
            _, writer = await asyncio.open_connection(*_endpoint(url))
            writer.close()
            await writer.wait_closed()
    except (OSError, TimeoutError, WorkerUnreachable):
        return False
    return True


def _endpoint(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise WorkerUnreachable(f"{url!r} is not an address of the form tcp://host:port")
    return host, port
