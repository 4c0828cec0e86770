"""An event loop in virtual time: nothing takes any, but to wait.

    something to do ──▶ it is done; the time stands
    nothing         ──▶ the time is that of the next timer

So what is measured on it is what was waited for, to the microsecond, on any machine. Clients find servers of the same loop by
their port, but not over the network, where what was sent may come a moment later: they are two ends of a pair of sockets, in
which it is there at once. Nobody else is waited for: threads and other processes would find that time has passed.
"""

import asyncio
import selectors
import socket
from collections.abc import Callable
from typing import Any

ASKS_NOBODY = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]


class _Jumping(selectors.DefaultSelector):
    """Lets time pass instead of waiting."""

    def __init__(self, passed: Callable[[float], None]) -> None:
        super().__init__()
        self._passed = passed

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(None if timeout is None else 0)
        if not found and timeout:
            self._passed(timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """One loop. Its time does not begin with 0, as no machine's does."""

    def __init__(self) -> None:
        self._seconds = 1000.0
        self._serving: dict[int, Callable[[], Any]] = {}
        super().__init__(_Jumping(self._pass))

    def _pass(self, seconds: float) -> None:
        self._seconds += seconds

    def time(self) -> float:
        return self._seconds

    async def getaddrinfo(self, *_: Any, **__: Any) -> Any:
        """Say that it is here: a thread would be asked."""
        return ASKS_NOBODY

    async def create_server(self, protocol_factory: Any, *where: Any, **options: Any) -> Any:
        server = await super().create_server(protocol_factory, *where, **options)
        for sock in server.sockets:
            self._serving[sock.getsockname()[1]] = protocol_factory
        return server

    async def create_connection(self, protocol_factory: Any, host: Any, port: Any, **_: Any) -> Any:  # type: ignore[override]
        ours, theirs = socket.socketpair()
        await self.connect_accepted_socket(self._serving[port], theirs)
        return await super().create_connection(protocol_factory, sock=ours)
