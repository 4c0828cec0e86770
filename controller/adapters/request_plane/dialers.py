"""Opens connections to workers over TCP; the module `nats_dialer` opens them through the broker.

All frames that one pass of a busy event loop sends to a worker are joined into one write. A write is a system call and wakes the
worker. Separate writes would therefore wake the worker for each request.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from controller.adapters.request_plane.connection import WorkerConnection
from controller.ports import WorkerUnreachable

PORT_S = 1.0  # timeout of a port probe, which succeeds even if the process hangs, because the kernel accepts connections

Make = Callable[[type[WorkerConnection]], WorkerConnection]
"""Creates a connection of the class that the dialer needs."""


class Dialer(Protocol):
    """The interface of a dialer, which opens connections to workers over one kind of transport."""

    async def ready(self) -> None:
        """Wait until connections are possible, for example until the broker is connected.

        Raise TimeoutError if that takes too long.
        """

    async def connect(self, url: str, make: Make) -> WorkerConnection:
        """Connect to `url` and return the connection, which `make` creates.

        The caller sets the deadline. Raise OSError if the connection fails, and WorkerUnreachable for an invalid URL.
        """


class CoalescingTransport(asyncio.Transport):
    """A transport that joins the writes of one pass of the event loop into one system call, which wakes the worker once.

    The order of the writes is kept. At full load with 64 users, five writes to a worker become one system call. If the last pass
    with writes had a single write, the first write of the next pass is sent at once. So at low load, writes are not delayed.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._writes = 0  # number of writes in this pass of the event loop
        self._busy = False  # whether the last pass with writes had more than one
        self._gathered: list[bytes | bytearray | memoryview] = []
        self._bytes = 0  # size of the writes in `_gathered`
        self.is_closing = transport.is_closing  # type: ignore[method-assign]  # without a wrapper: called per request

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
        """Write the data that this pass of the event loop has gathered. If the connection is closing, drop the data."""
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
    """A connection to a worker's TCP port, with joined writes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # a cast, because uvloop's transport is not a subclass of asyncio.Transport
        super().connection_made(CoalescingTransport(cast(asyncio.Transport, transport)))


class TcpDialer:
    """The dialer of workers with URLs of the form `tcp://host:port`."""

    async def ready(self) -> None:
        """Return at once, because TCP connections need no broker."""

    async def connect(self, url: str, make: Make) -> WorkerConnection:
        """Connect to the worker's port. Raise OSError, or WorkerUnreachable for an invalid URL."""
        host, port = _endpoint(url)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: make(TcpConnection), host, port)
        return connection


async def port_open(url: str) -> bool:
    """Return whether a process listens at the address `tcp://host:port`; False for an invalid URL or after 1 s."""
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
