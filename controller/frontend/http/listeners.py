"""The listening sockets: the port that all frontends of a host share, and this frontend's own admin port."""

import asyncio
import os
import socket
from functools import partial
from typing import Any

from aiohttp import web

from controller.frontend.http.api import Api
from controller.frontend.http.client_handler import ClientServer, Handler
from controller.frontend.http.fast_path import FastPathConnection
from controller.frontend.http.open_connections import OpenConnections
from controller.frontend.http.tls import Tls
from controller.frontend.openai.request_head import HeadCache
from controller.frontend.settings import FrontendSettings
from events.errors import HoldfastError

SHUTDOWN_S = 1.0  # for answers to end, and for what was answered to leave
_LOOK_S = 0.02
BACKLOG = 128  # connections that wait to be accepted


class SharedPortTaken(HoldfastError):
    """The port cannot be listened on. Choose another one with --port, or stop what holds it."""


class Listeners:
    """Both ports of one frontend."""

    def __init__(self, api: Api, settings: FrontendSettings, admin: Handler | None = None) -> None:
        """Answer with `api`, on the hosts and ports of the settings, once they are opened; `admin`: what answers on the admin
        port, if that is more than the api does there."""
        self._settings = settings
        self._endpoints = api.openai
        self._tls = Tls(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
        self._context = None if self._tls is None else self._tls.context
        bounds, body_mb_max = api.director.metrics.bounds, settings.admission.body_mb_max
        self._clients = OpenConnections(settings.connections, bounds)
        # Counted apart: a full public port does not close the admin port
        others = OpenConnections(settings.connections, bounds)
        # What answers all that is not plain, and has the connections on which such a request came
        self.aiohttp = ClientServer(api.handle, self._clients, body_mb_max)
        server = ClientServer(admin or api.admin, others, body_mb_max)
        self._admin = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_S)
        self._shared: asyncio.Server | None = None
        self._heads = HeadCache(settings.router, api.director.table, by_deadline=settings.by_deadline)
        self.fast_path: set[FastPathConnection] = set()  # connections that aiohttp has not taken over

    async def open(self) -> None:
        """Listen on the admin port, and hold the shared one, where the host's other frontends get all connections until
        `accept`. Raise SharedPortTaken."""
        settings = self._settings
        await self._admin.setup()
        admin = web.TCPSite(self._admin, settings.admin_host, settings.admin_port, ssl_context=self._context)
        make = partial(
            FastPathConnection, self._endpoints, self._heads, self.aiohttp, self.fast_path, self._clients
        )
        handshake_s = None if self._context is None else settings.connections.head_s
        port = settings.port
        try:
            self._shared = await asyncio.get_running_loop().create_server(
                make, settings.host, port, reuse_port=True, backlog=BACKLOG, start_serving=False,
                ssl=self._context, ssl_handshake_timeout=handshake_s,
            )  # fmt: skip
            port = settings.admin_port
            await admin.start()
        except OSError as error:
            raise SharedPortTaken(f"port {port}: {error.strerror}. {SharedPortTaken.__doc__}") from error

    async def accept(self) -> None:
        """Take connections on the shared port. Raise SharedPortTaken."""
        if self._shared is None:
            return
        try:
            # uvloop reports no error if another process has begun to listen meanwhile
            for held in self._shared.sockets:
                with socket.socket(fileno=os.dup(held.fileno())) as same:
                    same.listen(BACKLOG)
            await self._shared.start_serving()
            self._endpoints.listening = True
        except OSError as error:
            raise SharedPortTaken(
                f"port {self._settings.port}: {error.strerror}. {SharedPortTaken.__doc__}"
            ) from error

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """What listens on the shared port. Between `open` and `refuse`."""
        assert self._shared is not None
        return self._shared.sockets

    @property
    def url(self) -> str:
        """Where the API answers. Between `open` and `refuse`."""
        return self._url(self.sockets[0].getsockname())

    @property
    def admin_url(self) -> str:
        """Where metrics and readiness answer, of this frontend alone."""
        return self._url(self._admin.addresses[0])

    def _url(self, address: Any) -> str:
        host, port = address[:2]
        return f"{'http' if self._tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"

    def check(self) -> None:
        """Read the certificate again if it has changed. Called every second."""
        if self._tls is not None:
            self._tls.refresh()

    async def refuse(self) -> None:
        """Take no new connections on the shared port: the host's other frontends get them."""
        self._endpoints.listening = False
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    async def close(self) -> None:
        """Close everything."""
        await self.refuse()
        await asyncio.sleep(0)  # let received requests start
        self.aiohttp.pre_shutdown()
        await asyncio.gather(self._end_all(), self.aiohttp.shutdown(SHUTDOWN_S))
        await self._admin.cleanup()
        await self._endpoints.close()

    async def _end_all(self) -> None:
        """Let what is answered on the fast path end, and what was written leave, for `SHUTDOWN_S`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + SHUTDOWN_S
        for connection in tuple(self.fast_path):
            connection.end()
        while self.fast_path and loop.time() < until:  # noqa: ASYNC110 (a moment, once in a life)
            await asyncio.sleep(_LOOK_S)
        late = [task for connection in tuple(self.fast_path) if (task := connection.end()) is not None]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
