"""Doubles for scale hooks: commands that run a line of Python, and a server of a scale subresource."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from controller.adapters.scaling.command_hook import CommandScaleHook
from controller.adapters.scaling.http_hook import MERGE, HttpScaleHook
from controller.ports import ScaleRequest

WANTED = ScaleRequest(model="sim", before=2, after=4, why="up", proposal="p-1", planner="planner-0")


def command(program: str, timeout_s: float = 30.0) -> CommandScaleHook:
    """Return a hook with a Python program as its command."""
    return CommandScaleHook([sys.executable, "-c", program], timeout_s)


@dataclass
class ScaleServer:
    """Simulates the scale subresource of one deployment. `instead`, if set, answers in its place."""

    url: str = ""
    replicas: int = 2
    version: int = 7
    shows_version: bool = True
    instead: Callable[[web.Request], Any] | None = None
    after_get: Callable[[], None] = lambda: None
    asked: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer as Kubernetes does."""
        body = await request.read()
        change: Any = json.loads(body) if body else None
        self.asked.append((request.method, request.raw_path, dict(request.headers), change))
        if self.instead is not None:
            found = self.instead(request)
            answer: web.StreamResponse = await found if asyncio.iscoroutine(found) else found
            return answer
        if request.method == "GET":
            shown = self.scale()
            self.after_get()
            return shown
        if request.headers["Content-Type"] != MERGE:
            return status(415, "the body of the request was in an unknown format")
        wanted = change.get("metadata", {}).get("resourceVersion")
        if wanted is not None and wanted != str(self.version):
            return status(
                409, "the object has been modified; please apply your changes to the latest version"
            )
        self.replicas, self.version = change["spec"]["replicas"], self.version + 1
        return self.scale()

    def scale(self) -> web.Response:
        """Return the Scale. As in Kubernetes, zero replicas are omitted."""
        metadata = {"name": "sim", **({"resourceVersion": str(self.version)} if self.shows_version else {})}
        spec = {"replicas": self.replicas} if self.replicas else {}
        return web.json_response(
            {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": metadata, "spec": spec}
        )

    def hook(self, path: str = "/scale", **more: Any) -> HttpScaleHook:
        """Return a hook for this server."""
        return HttpScaleHook(self.url + path, **more)


def status(code: int, message: str) -> web.Response:
    """Return a Kubernetes Status."""
    return web.json_response({"kind": "Status", "status": "Failure", "message": message}, status=code)


@asynccontextmanager
async def serving() -> AsyncIterator[ScaleServer]:
    """Run a server on a port of its own."""
    played = ScaleServer()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", played.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    played.url = f"http://{host}:{port}"
    try:
        yield played
    finally:
        await runner.cleanup()
