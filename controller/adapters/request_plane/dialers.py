"""How a connection to a worker is made: straight to its port. `nats_dialer` dials through the broker.

What a busy turn of the loop says to a worker over its port leaves as one write: each write is a call of the system, and
wakes the worker, who would read one request where ten are on their way.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from controller.adapters.request_plane.connection import WorkerConnection
from controller.ports import WorkerUnreachable

PORT_S = 1.0  # until a port answers: the system does it, in the place of a process that hangs

Make = Callable[[type[WorkerConnection]], WorkerConnection]
"""Makes a connection, of the kind that the dialer needs."""


class Dialer(Protocol):
    """One kind of connection."""

    async def ready(self) -> None:
        """Wait until connections can be made at all. Raise TimeoutError."""
        ...

    async def connect(self, url: str, make: Make) -> WorkerConnection:
        """Return a fresh connection; the deadline is the caller's. Raise OSError or WorkerUnreachable."""
        ...


class CoalescingTransport(asyncio.Transport):
    """A transport that writes at the end of a turn of the loop, in order, all that the turn has said: one call of the system
    and one waking of the worker for as many frames as a busy turn has.

    Of five writes to a worker, each a call of the system, one is left with 64 users flat out. Where turns say one thing each,
    nothing waits for a turn's end: what comes first is written at once, unless the last
    turn that said something said more.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._said = 0  # things, in this turn
        self._busy = False  # the last turn that said something said several things
        self._gathered: list[bytes] = []
        self._bytes = 0  # of them
        self.is_closing = transport.is_closing  # type: ignore[method-assign]  # asked for every request

    def write(self, data: Any) -> None:
        self._said += 1
        if self._said == 1:
            self._loop.call_soon(self._leave)
            if not self._busy:
                self._transport.write(data)
                return
        self._gathered.append(data)
        self._bytes += len(data)

    def _leave(self) -> None:
        """A turn is over: write what has gathered; nothing, where the connection has gone meanwhile."""
        self._busy, self._said = self._said > 1, 0
        self._flush()

    def _flush(self) -> None:
        data, self._bytes = b"".join(self._gathered), 0
        self._gathered.clear()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        return self._bytes + self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


class TcpConnection(WorkerConnection):
    """A connection to a worker's own port."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(
            CoalescingTransport(cast(asyncio.Transport, transport))
        )  # uvloop's is not a subclass


class TcpDialer:
    """To a worker's own port: `tcp://host:port`."""

    async def ready(self) -> None:
        """There is nothing to wait for."""

    async def connect(self, url: str, make: Make) -> WorkerConnection:
        """Connect to the port. Raise OSError, or WorkerUnreachable where the URL is no address."""
        host, port = _endpoint(url)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: make(TcpConnection), host, port)
        return connection


async def port_open(url: str) -> bool:
    """Return whether something listens at an address, `tcp://host:port`; of what is none: False."""
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
        raise WorkerUnreachable(f"{url!r} is not an address: tcp://host:port is")
    return host, port
