"""An event loop in virtual time: only waiting takes time.

    ready callbacks ──▶ they run; time stands still
    none            ──▶ time jumps to the next timer

So measured times are exactly the waiting times, to the microsecond, on any machine. Clients find servers of the same loop by
their port, but not over the network, where data may arrive a moment later: they are the two ends of a socket pair, in
which data is available at once. Threads and other processes are not waited for: they would find that time has passed.
"""

import asyncio
import selectors
import socket
from collections.abc import Callable
from typing import Any

OWN_ADDRESS = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]


class _Jumping(selectors.DefaultSelector):
    """Advances time instead of waiting."""

    def __init__(self, passed: Callable[[float], None]) -> None:
        super().__init__()
        self._passed = passed

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(None if timeout is None else 0)
        if not found and timeout:
            self._passed(timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """One loop. Its time does not start at 0, as on no machine."""

    def __init__(self) -> None:
        self._seconds = 1000.0
        self._serving: dict[int, Callable[[], Any]] = {}
        self._ports: dict[socket.socket, int] = {}
        super().__init__(_Jumping(self._pass))

    def _pass(self, seconds: float) -> None:
        self._seconds += seconds

    def time(self) -> float:
        return self._seconds

    async def getaddrinfo(self, *_: Any, **__: Any) -> Any:
        """Resolve to this loop: otherwise a thread would be used."""
        return OWN_ADDRESS

    async def create_server(self, protocol_factory: Any, *where: Any, **options: Any) -> Any:
        server = await super().create_server(protocol_factory, *where, **options)
        for sock in server.sockets:
            self._serving[sock.getsockname()[1]] = protocol_factory
        return server

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Record to which port a socket is to be connected: aiohttp then passes the socket to `create_connection`."""
        self._ports[sock] = address[1]

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **_: Any
    ) -> Any:
        if sock is not None:
            port = self._ports.pop(sock)
            sock.close()
        ours, theirs = socket.socketpair()
        await self.connect_accepted_socket(self._serving[port], theirs)
        return await super().create_connection(protocol_factory, sock=ours)
