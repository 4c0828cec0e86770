"""The doors: the port that all frontends of a host share, and this frontend's own admin port."""

import asyncio
import os
import socket
from functools import partial
from typing import Any

from aiohttp import web

from controller.frontend.api import Api, Handler
from controller.frontend.connection import Connection
from controller.frontend.heads import known_heads
from controller.frontend.settings import FrontendSettings
from events.errors import HoldfastError

SHUTDOWN_S = 1.0
_LOOK_S = 0.02
KEEPALIVE_S = 75.0
BACKLOG = 128  # connections that wait to be accepted


class PortTaken(HoldfastError):
    """The port cannot be listened on. Choose another one with --port, or stop what holds it."""


class Doors:
    """Both ports of one frontend."""

    def __init__(self, api: Api, settings: FrontendSettings) -> None:
        self._settings = settings
        self._api = api
        self._public = _runner(api.handle, settings.admission.body_mb_max)
        self._admin = _runner(api.admin, settings.admission.body_mb_max)  # `holdfast route` sends prompts
        self._shared: asyncio.Server | None = None
        self._heads = known_heads(settings.router)
        self._open: set[Connection] = set()  # on the shared port, and still on the short way

    async def open(self) -> None:
        """Listen on the admin port, and hold the shared one, where the host's other frontends get all connections until
        `let_in`. Raise PortTaken."""
        settings = self._settings
        await self._public.setup()
        await self._admin.setup()
        admin = web.TCPSite(self._admin, settings.admin_host, settings.admin_port)
        port = settings.port
        try:
            self._shared = await self._hold(settings.host, port)
            port = settings.admin_port
            await admin.start()
        except OSError as error:
            raise PortTaken(f"port {port}: {error.strerror}. {PortTaken.__doc__}") from error

    async def _hold(self, host: str, port: int) -> asyncio.Server:
        server = self._public.server
        assert server is not None
        loop = asyncio.get_running_loop()
        make = partial(Connection, self._api, self._heads, server, self._open, KEEPALIVE_S)
        return await loop.create_server(
            make, host, port, reuse_port=True, backlog=BACKLOG, start_serving=False
        )

    async def let_in(self) -> None:
        """Take connections on the shared port. Raise PortTaken."""
        if self._shared is None:
            return
        try:
            # uvloop says nothing when somebody else has begun to listen meanwhile
            for held in self._shared.sockets:
                with socket.socket(fileno=os.dup(held.fileno())) as same:
                    same.listen(BACKLOG)
            await self._shared.start_serving()
            self._api.listening = True
        except OSError as error:
            raise PortTaken(f"port {self._settings.port}: {error.strerror}. {PortTaken.__doc__}") from error

    @property
    def url(self) -> str:
        """Where the API answers. Between `open` and `shut`."""
        assert self._shared is not None
        return _url(self._shared.sockets[0].getsockname())

    @property
    def admin_url(self) -> str:
        """Where metrics and readiness answer, of this frontend alone."""
        return _url(self._admin.addresses[0])

    async def shut(self) -> None:
        """Take no new connections on the shared port: the host's other frontends get them."""
        self._api.listening = False
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    async def close(self) -> None:
        """Close everything."""
        await self.shut()
        await asyncio.gather(self._end_all(), self._public.cleanup())
        await self._admin.cleanup()

    async def _end_all(self) -> None:
        """Let what is answered on the short way end, and what was said leave, for a moment."""
        loop = asyncio.get_running_loop()
        until = loop.time() + SHUTDOWN_S
        answering = [task for connection in tuple(self._open) if (task := connection.end()) is not None]
        if answering:
            _, late = await asyncio.wait(answering, timeout=SHUTDOWN_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for connection in tuple(self._open):
            connection.end()
        while self._open and loop.time() < until:  # noqa: ASYNC110 (a moment, once in a life)
            await asyncio.sleep(_LOOK_S)


def _runner(handler: Handler, body_mb_max: int) -> web.ServerRunner:
    loop = asyncio.get_running_loop()
    make = partial(web.BaseRequest, loop=loop, client_max_size=body_mb_max * 1024 * 1024)
    server = web.Server(
        handler,
        request_factory=make,
        handler_cancellation=True,  # a client that goes away is noticed in the same turn of the loop
        access_log=None,
        keepalive_timeout=KEEPALIVE_S,
    )
    return web.ServerRunner(server, shutdown_timeout=SHUTDOWN_S)


def _url(address: Any) -> str:
    host, port = address[:2]
    return f"http://{host}:{port}"
