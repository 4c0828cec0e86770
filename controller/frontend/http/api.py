"""What a frontend answers over HTTP, on which path: the OpenAI-compatible endpoints, its models, its health, its metrics.

A bare aiohttp server with a table of paths: an `Application`'s routing and middlewares would cost as much as
relaying thirty tokens, on every request.
"""

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import structlog
from aiohttp import web

from controller.frontend.director import Director
from controller.frontend.errors import ApiError, internal, quoted, starting
from controller.frontend.http.api_keys import ApiKeys
from controller.frontend.http.busy_threshold import BusyThresholdEndpoint
from controller.frontend.http.explain import explain
from controller.frontend.http.openai_endpoints import OpenAiEndpoints, refusal
from controller.frontend.http.openapi import VERSION, encoded
from controller.frontend.http.routes import JSON, ROUTES, templated
from controller.frontend.http.served_models import model_entry, not_served, served_names
from controller.frontend.http.tokenizing import TokenizerEndpoints
from controller.frontend.openai.request_head import ENDPOINTS, id_header
from controller.frontend.openai.response_models import ModelList, Version
from events.process import admin_guard
from events.process.admin_guard import own_hosts
from events.process.exposition import packed

log = structlog.get_logger(__name__)
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

ADMIN_PATHS = frozenset(route.path for route in ROUTES if route.admin)
OPEN_PATHS = frozenset(("/health", "/ready", "/live", "/ping"))  # probes have no key
API_PATHS = frozenset(route.path for route in ROUTES if route.api)


class Api:
    """What a frontend answers over HTTP."""

    def __init__(self, director: Director, openai: OpenAiEndpoints | None = None) -> None:
        """Answer with what this director routes to; `openai` where its endpoints are not made as usual."""
        self.director = director
        self.openai = openai or OpenAiEndpoints(director)
        self._admin_keys = ApiKeys.of(director.settings.admin_key_file)
        self._hosts = own_hosts()
        self.draining = False
        self.listening = False  # on the port that the host's frontends share
        tokenizers = TokenizerEndpoints(director, self.openai)
        thresholds = BusyThresholdEndpoint(director, self.openai.intake)
        by_name: dict[str, Handler] = {
            **{name: partial(self.openai.serve, name) for name in ENDPOINTS.values()},
            "models": self._models,
            "model": self._model,
            "tokenize": tokenizers.tokenize,
            "detokenize": tokenizers.detokenize,
            "thresholds": thresholds.listed,
            "set_thresholds": thresholds.set,
            "openapi": self._openapi,
            "version": self._version,
            "ping": self._ping,
            "health": self._health,
            "live": self._live,
            "metrics": self._metrics,
        }
        self.routes = {(route.method, route.path): by_name[route.name] for route in ROUTES}

    # --- dispatch -----------------------------------------------------------------------------------------

    async def handle(self, request: web.BaseRequest, *, admin: bool = False) -> web.StreamResponse:
        """Answer one request; `admin`: on the admin port."""
        cors = None if admin else self.openai.cors
        if cors is None:
            return await self._handle(request, admin=admin)
        asked = cors.preflight(request.headers) if request.method == "OPTIONS" else None
        response = await self._handle(request, admin=False) if asked is None else asked
        response.headers.update(cors.headers(request.headers.get("Origin", "")))
        return response

    async def _handle(self, request: web.BaseRequest, *, admin: bool) -> web.StreamResponse:
        method = "GET" if request.method == "HEAD" else request.method  # aiohttp leaves the body out
        handler = self.routes.get((method, request.path)) or self.routes.get(
            (method, templated(request.path)[0])
        )
        if request.path in ADMIN_PATHS and not (admin or self.director.settings.admin_api):
            handler = None
        try:
            keys = self.openai.keys
            if keys is not None and not admin and request.path not in OPEN_PATHS:
                keys.check(request.headers.get("Authorization", ""))
            if handler is None:
                raise self._nowhere(request)
            return await handler(request)
        except ApiError as error:
            return refusal(error, id_header(request))
        except Exception:  # a mistake of ours: this client gets an answer, and the others are not touched
            known = templated(request.path)[0] if handler is not None else ""  # no words of the client's
            log.exception("request_failed", path=known)
            transport = request.transport
            if request.writer.output_size or transport is None or transport.is_closing():
                raise
            return refusal(internal(), id_header(request))

    async def admin(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request on the admin port: everything but the API."""
        if why := self._refusal(request):
            return refusal(ApiError(403, why, code="admin_refused"), {})
        if (request.method, request.path) == ("POST", "/route"):
            try:
                intake = self.openai.intake
                asked = await intake.parsed("json", request)
                return web.json_response(await explain(self.director, asked, intake))
            except ApiError as error:
                return refusal(error, {})
        if templated(request.path)[0] in API_PATHS or request.path.startswith("/v1/"):
            why = "this is the admin port; the API is on the frontend's own port"
            return refusal(ApiError(404, why, code="unknown_url"), {})
        return await self.handle(request, admin=True)

    def _refusal(self, request: web.BaseRequest) -> str:
        """Return why a request on the admin port is not answered; empty: it is."""
        if why := admin_guard.refusal(request.headers, self._hosts):
            return why
        transport = request.transport
        if request.method in admin_guard.READING or request.path == "/ping" or transport is None:
            return ""
        if admin_guard.is_local(transport.get_extra_info("peername"), transport.get_extra_info("sockname")):
            return ""
        keys = self._admin_keys
        if keys is not None:
            keys.refresh()
            if keys.named(request.headers.get("Authorization", "")):
                return ""
        return "from another host this needs an admin key (--admin-key-file): Authorization: Bearer KEY"

    def _nowhere(self, request: web.BaseRequest) -> ApiError:
        asked = templated(request.path)[0]
        methods = [m for m, path in self.routes if path == asked and path not in ADMIN_PATHS]
        path = quoted(request.path)
        if methods:
            allowed = ", ".join(f"{one}, HEAD" if one == "GET" else one for one in methods)
            why = f"{path} wants {' or '.join(methods)}"
            return ApiError(405, why, code="method_not_allowed", allow=allowed)
        return ApiError(404, f"unknown path: {request.method} {path}", code="unknown_url")

    def drain(self) -> None:
        """Take no new requests: say so, and send away those that come all the same."""
        self.draining = True
        self.openai.drain()

    async def close(self) -> None:
        """End what runs beside the event loop."""
        await self.openai.close()

    # --- models, health, metrics --------------------------------------------------------------------------

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        director = self.director
        if not director.live and not director.table.served:
            raise starting()
        return _json(ModelList([model_entry(director, *names) for names in served_names(director)]))

    async def _model(self, request: web.BaseRequest) -> web.StreamResponse:
        _, model = templated(request.path)
        found = dict(served_names(self.director)).get(model)
        if found is None:
            raise not_served(self.director, model)
        return _json(model_entry(self.director, model, found))

    async def _openapi(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=encoded(), content_type=JSON)

    async def _version(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json(Version(VERSION))

    async def _ping(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=200 if self._ready else 503)

    @property
    def _ready(self) -> bool:
        """Whether this frontend takes requests, and could serve one."""
        return self.director.routing.monitor.servable and self.listening and not self.draining

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        monitor = self.director.routing.monitor
        servable, ready = monitor.servable, self._ready
        status = "healthy" if ready else "shutting_down" if self.draining else "not_ready"
        message = {
            "healthy": "requests are served",
            "not_ready": "its port is about to open"
            if servable
            else "no worker in service can be reached yet",
            "shutting_down": "this frontend finishes its streams and takes no new ones",
        }[status]
        body = {"status": status, "message": message, "workers": monitor.roll()}
        return web.json_response(body, status=200 if ready else 503)

    async def _live(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"status": "live", "message": "Service is live"})

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        accepts = ",".join(request.headers.getall("Accept-Encoding", ()))
        body, coded = packed(self.director.render_metrics(), accepts)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4", **coded})


def _json(answer: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type=JSON)
