"""aiohttp's end of a client's connection, with two bounds that it has not: how many there are, and how long a head may take.

    first byte of a head ── head_s ──▶ 408, unless the head is whole by then
    no request ── idle_s ──▶ closed: aiohttp's own timer

What a reader would get wrong: only the wait for a head is timed, not that for a body, which has a deadline of its own. A head
that begins behind a request, before its answer has ended, has as long as an idle connection.
"""

import asyncio
from functools import partial
from typing import Any, cast

from aiohttp import web

from controller.frontend.errors import quoted
from controller.frontend.http.api import Handler
from controller.frontend.http.open_connections import OpenConnections

MIB = 2**20


class ClientHandler(web.RequestHandler):
    """One connection."""

    __slots__ = ("_clients", "_head_timer", "_let_in")

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, clients: OpenConnections) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=cast(Any, None),  # it is told of nothing
            keepalive_timeout=clients.settings.idle_s,
            auto_decompress=False,  # `Intake` inflates, no further than it must
        )
        self._clients = clients
        self._head_timer: asyncio.TimerHandle | None = None
        self._let_in: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come, or is handed over."""
        client = cast(asyncio.Transport, transport)
        if self._clients.enter(client):
            self._let_in = client
            super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the first of a head start its time."""
        if self._let_in is None:
            return
        known = self._request_count
        super().data_received(data)
        if self._request_count != known:
            self._stop_head_timer()
        elif data and self._head_timer is None and self._waits_for_a_head:
            self._head_timer = self._loop.call_later(self._clients.settings.head_s, self._head_is_late)

    @property
    def _waits_for_a_head(self) -> bool:
        waits = self._waiter is not None and not self._waiter.done()
        return not self._messages and (waits or self._request_count == 0)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._let_in is not None and self._waits_for_a_head:
            self._clients.end_late_head(self._let_in)
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no request; aiohttp quotes all of the line that it did not understand."""
        return super().handle_error(request, status, exc, None if message is None else quoted(message))

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has gone."""
        self._stop_head_timer()
        if self._let_in is not None:
            self._clients.leave(self._let_in)
            self._let_in = None
            super().connection_lost(exc)


class ClientServer(web.Server):
    """What makes them, for one port."""

    def __init__(self, handler: Handler, clients: OpenConnections, body_mb_max: int) -> None:
        """Answer with `handler`; a client that goes away is noticed in the same turn of the loop."""
        loop = asyncio.get_running_loop()
        make = partial(web.BaseRequest, loop=loop, client_max_size=body_mb_max * MIB)
        super().__init__(handler, request_factory=make, handler_cancellation=True)
        self._clients = clients

    def __call__(self) -> ClientHandler:
        return ClientHandler(self, asyncio.get_running_loop(), self._clients)
