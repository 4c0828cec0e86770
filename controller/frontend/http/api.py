"""What a frontend answers over HTTP, on which path: the OpenAI-compatible endpoints, its models, its health, its metrics.

A bare aiohttp server with a table of paths: an `Application`'s routing and middlewares would cost as much as
relaying thirty tokens, on every request.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import structlog
from aiohttp import web

from controller.frontend.director import Director
from controller.frontend.errors import ApiError, internal, starting
from controller.frontend.http.explain import explain
from controller.frontend.http.openai_endpoints import OpenAiEndpoints, not_served, refusal
from controller.frontend.requests.head import ENDPOINTS
from controller.frontend.requests.reading import id_header, read_body
from controller.frontend.requests.schema import read_json

log = structlog.get_logger(__name__)
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Api:
    """What a frontend answers over HTTP."""

    def __init__(self, director: Director, openai: OpenAiEndpoints | None = None) -> None:
        """Answer with what this director routes to; `openai` where its endpoints are not made as usual."""
        self.director = director
        self.openai = openai or OpenAiEndpoints(director)
        self.draining = False
        self.listening = False  # on the port that the host's frontends share
        self._routes: dict[tuple[str, str], Handler] = {
            **{("POST", path): partial(self.openai.serve, endpoint) for path, endpoint in ENDPOINTS.items()},
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._health,
            ("GET", "/live"): self._live,
            ("GET", "/metrics"): self._metrics,
        }

    # --- dispatch -----------------------------------------------------------------------------------------

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        method = "GET" if request.method == "HEAD" else request.method  # aiohttp leaves the body out
        handler = self._routes.get((method, request.path))
        if handler is None and method == "GET" and request.path.startswith("/v1/models/"):
            handler = self._model
        try:
            if handler is None:
                raise self._nowhere(request)
            return await handler(request)
        except ApiError as error:
            return refusal(error, id_header(request))
        except Exception:  # a mistake of ours: this client gets an answer, and the others are not touched
            known = request.path if (method, request.path) in self._routes else ""  # no words of the client's
            log.exception("request_failed", path=known)
            transport = request.transport
            if request.writer.output_size or transport is None or transport.is_closing():
                raise
            return refusal(internal(), id_header(request))

    async def admin(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request on the admin port: everything but the API."""
        if (request.method, request.path) == ("POST", "/route"):
            try:
                body = await read_body(request, self.director.settings.admission)
                return web.json_response(await explain(self.director, read_json(body)))
            except ApiError as error:
                return refusal(error, {})
        if request.path.startswith("/v1/"):
            why = "this is the admin port; the API is on the frontend's own port"
            return refusal(ApiError(404, why, code="unknown_url"), {})
        return await self.handle(request)

    def _nowhere(self, request: web.BaseRequest) -> ApiError:
        method = next((method for method, path in self._routes if path == request.path), "")
        if method:
            why = f"{request.path} wants {method}"
            return ApiError(
                405, why, code="method_not_allowed", allow="GET, HEAD" if method == "GET" else method
            )
        path = request.path[:200]
        return ApiError(404, f"unknown path: {request.method} {path}", code="unknown_url")

    def drain(self) -> None:
        """Take no new requests: say so, and send away those that come all the same."""
        self.draining = True
        self.openai.drain()

    # --- models, health, metrics --------------------------------------------------------------------------

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self.director.live and not self.director.routing.served:
            raise starting()
        return web.json_response(
            {"object": "list", "data": [_row(model) for model in self.director.routing.served]}
        )

    async def _model(self, request: web.BaseRequest) -> web.StreamResponse:
        model = request.path.removeprefix("/v1/models/")
        if model not in self.director.routing.served:
            raise not_served(self.director, model)
        return web.json_response(_row(model))

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        routing = self.director.routing
        servable = routing.servable
        ready = servable and self.listening and not self.draining
        status = "healthy" if ready else "shutting_down" if self.draining else "not_ready"
        message = {
            "healthy": "requests are served",
            "not_ready": "its port is about to open"
            if servable
            else "no worker in service can be reached yet",
            "shutting_down": "this frontend finishes its streams and takes no new ones",
        }[status]
        body = {"status": status, "message": message, "workers": routing.roll()}
        return web.json_response(body, status=200 if ready else 503)

    async def _live(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"status": "live", "message": "Service is live"})

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(
            body=self.director.render_metrics(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )


def _row(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "holdfast"}
