"""The doors: the port that all frontends of a host share, and this frontend's own admin port."""

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from controller.frontend.api import Api, Handler
from controller.frontend.settings import FrontendSettings
from events.errors import HoldfastError

SHUTDOWN_S = 1.0
KEEPALIVE_S = 75.0


class PortTaken(HoldfastError):
    """The port cannot be listened on. Choose another one with --port, or stop what holds it."""


class Doors:
    """Both ports of one frontend."""

    def __init__(self, api: Api, settings: FrontendSettings) -> None:
        self._settings = settings
        self._public = _runner(api.handle, settings.admission.body_mb_max)
        self._admin = _runner(api.admin, 1)
        self._site: web.TCPSite | None = None

    async def open(self) -> None:
        """Listen on both ports. Raise PortTaken."""
        settings = self._settings
        await self._public.setup()
        await self._admin.setup()
        self._site = web.TCPSite(self._public, settings.host, settings.port, reuse_port=True)
        admin = web.TCPSite(self._admin, settings.admin_host, settings.admin_port)
        for site, port in ((self._site, settings.port), (admin, settings.admin_port)):
            try:
                await site.start()
            except OSError as error:
                raise PortTaken(f"port {port}: {error.strerror}. {PortTaken.__doc__}") from error

    @property
    def url(self) -> str:
        """Where the API answers."""
        return _url(self._public)

    @property
    def admin_url(self) -> str:
        """Where metrics and readiness answer, of this frontend alone."""
        return _url(self._admin)

    async def shut(self) -> None:
        """Take no new connections on the shared port: the host's other frontends get them."""
        if self._site is not None:
            site, self._site = self._site, None
            await site.stop()

    async def close(self) -> None:
        """Close everything."""
        await self._public.cleanup()
        await self._admin.cleanup()


def _runner(handler: Handler, body_mb_max: int) -> web.ServerRunner:
    loop = asyncio.get_running_loop()

    def make(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: Any,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        size = body_mb_max * 1024 * 1024
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=size)

    server = web.Server(
        handler,
        request_factory=make,
        handler_cancellation=True,  # a client that goes away is noticed in the same turn of the loop
        access_log=None,
        keepalive_timeout=KEEPALIVE_S,
    )
    return web.ServerRunner(server, shutdown_timeout=SHUTDOWN_S)


def _url(runner: web.ServerRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"
