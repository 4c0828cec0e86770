"""The listening sockets: the API port, shared by the frontends of a host, and the admin port."""

import asyncio
import os
import socket
from functools import partial

from aiohttp import web

from controller.frontend.http.api import Api
from controller.frontend.http.client_handler import ClientServer, Handler, OpenConnections
from controller.frontend.http.credentials import Tls
from controller.frontend.http.fast_path import FastPathConnection
from controller.frontend.openai.request_head import HeadCache
from controller.frontend.settings import FrontendSettings
from events.errors import HoldfastError

SHUTDOWN_S = 1.0  # seconds for running requests to finish and for responses to be sent
_LOOK_S = 0.02
BACKLOG = 128  # connections that the kernel queues until they are accepted


class SharedPortTaken(HoldfastError):
    """Cannot listen on the port. Choose another one with --port, or stop the process that uses it."""


class Listeners:
    """The API port and the admin port of one frontend, from listening to shutdown."""

    def __init__(self, api: Api, settings: FrontendSettings, admin: Handler | None = None) -> None:
        """Prepare to serve `api` on the hosts and ports of the settings. `open` starts listening.

        `admin` handles the requests on the admin port. If it is None, the admin port serves the admin routes of `api`.
        """
        self._settings = settings
        self._endpoints = api.openai
        self._tls = Tls(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
        self._context = None if self._tls is None else self._tls.context
        bounds, body_mb_max = api.director.metrics.bounds, settings.admission.body_mb_max
        self._clients = OpenConnections(settings.connections, bounds)
        # Counted separately, because a full API port must not block the admin port.
        others = OpenConnections(settings.connections, bounds)
        # Handles all requests that are not plain, and all later requests on a connection with such a request.
        self.aiohttp = ClientServer(api.handle, self._clients, body_mb_max)
        server = ClientServer(admin or api.admin, others, body_mb_max)
        self._admin = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_S)
        self._shared: asyncio.Server | None = None
        self._heads = HeadCache(settings.router, api.director.table, by_deadline=settings.by_deadline)
        self.fast_path: set[FastPathConnection] = set()  # connections that are not handed over to aiohttp

    async def open(self) -> None:
        """Listen on the admin port, and bind the shared API port.

        Until `accept` is called, the host's other frontends get all connections to the shared port. Raise
        SharedPortTaken if a port is in use.
        """
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
            raise _taken(port, error) from error

    async def accept(self) -> None:
        """Accept connections on the shared API port. Raise SharedPortTaken if another process listens on this port."""
        if self._shared is None:
            return
        try:
            # uvloop reports no error if another process has started to listen in the meantime
            for held in self._shared.sockets:
                with socket.socket(fileno=os.dup(held.fileno())) as same:
                    same.listen(BACKLOG)
            await self._shared.start_serving()
            self._endpoints.listening = True
        except OSError as error:
            raise _taken(self._settings.port, error) from error

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The listening sockets of the shared port. Valid between `open` and `refuse`."""
        assert self._shared is not None
        return self._shared.sockets

    @property
    def url(self) -> str:
        """The URL of the API. Valid between `open` and `refuse`."""
        return self._url(*self.sockets[0].getsockname())

    @property
    def admin_url(self) -> str:
        """The URL of the admin port of this frontend."""
        return self._url(*self._admin.addresses[0])

    def _url(self, host: str, port: int, *_: object) -> str:
        return f"{'http' if self._tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"

    def check(self) -> None:
        """Reload the certificate if it has changed. Called every second."""
        if self._tls is not None:
            self._tls.refresh()

    async def refuse(self) -> None:
        """Stop accepting connections on the shared API port, so that the host's other frontends get them."""
        self._endpoints.listening = False
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    async def close(self) -> None:
        """Close both ports, let requests in progress finish for up to SHUTDOWN_S, then end all connections."""
        await self.refuse()
        await asyncio.sleep(0)  # let received requests start
        self.aiohttp.pre_shutdown()
        await asyncio.gather(self._end_all(), self.aiohttp.shutdown(SHUTDOWN_S))
        await self._admin.cleanup()
        intake = self._endpoints.intake
        await intake.close()

    async def _end_all(self) -> None:
        """Let the fast path finish its responses for up to SHUTDOWN_S, then cancel the rest."""
        loop = asyncio.get_running_loop()
        until = loop.time() + SHUTDOWN_S
        for connection in tuple(self.fast_path):
            connection.end()
        while self.fast_path and loop.time() < until:  # noqa: ASYNC110 (short, and once per process)
            await asyncio.sleep(_LOOK_S)
        late = [task for connection in tuple(self.fast_path) if (task := connection.end()) is not None]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


def _taken(port: int, error: OSError) -> SharedPortTaken:
    return SharedPortTaken(f"port {port}: {error.strerror}. {SharedPortTaken.__doc__}")
