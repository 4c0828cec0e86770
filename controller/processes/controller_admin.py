"""The admin port of controllers and planners: /metrics, /health, /live and /ready."""

import asyncio
from collections.abc import Callable, Iterable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from controller.metrics import CONTENT_TYPE
from events.errors import HoldfastError
from events.json_types import JsonView
from events.process import admin_guard
from events.process.admin_guard import own_hosts
from events.process.exposition import packed


async def serve(
    render: Callable[[], bytes],
    report: Callable[[], JsonView],
    host: str,
    port: int,
    more: Iterable[web.RouteDef] = (),
    probes: Iterable[str] = ("/health", "/live", "/ready"),
) -> web.AppRunner:
    """Open the admin port and return its server. Raise HoldfastError if the port is not available.

    The routes are /metrics, the paths in `probes`, and `more`. `render` returns the metrics as text, and `report` the body of
    the probes.
    """

    async def metrics(request: web.Request) -> web.Response:
        # in a thread, because rendering takes a quarter of a second for a thousand workers
        accepts = ",".join(request.headers.getall("Accept-Encoding", ()))
        body, coded = await asyncio.to_thread(lambda: packed(render(), accepts))
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE, **coded})

    async def health(request: web.Request) -> web.Response:
        body = dict(report())
        return web.json_response(body, status=503 if request.path == "/ready" and not body["ready"] else 200)

    app = web.Application(middlewares=[guarded(own_hosts())])
    app.add_routes([web.get("/metrics", metrics)])
    app.add_routes([web.get(path, health) for path in probes])
    app.add_routes(more)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await listen(runner, host, port)
    return runner


def guarded(hosts: frozenset[str]) -> Middleware:
    """Return a middleware that rejects, with status 403, the requests that `admin_guard` refuses."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if why := admin_guard.refusal(request.headers, hosts):
            return web.json_response({"error": why}, status=403)
        return await handler(request)

    return guard


async def listen(runner: web.AppRunner, host: str, port: int) -> None:
    """Start listening on the port. Raise HoldfastError if the port is not available."""
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise HoldfastError(f"cannot use the admin port {host}:{port}: {error.strerror}") from error


def url_of(runner: web.AppRunner) -> str:
    """Return the URL of the port on which a server listens."""
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"
