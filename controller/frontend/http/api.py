"""Dispatches HTTP requests to routes, on the API port and on the admin port.

The server is bare aiohttp with a table of routes. For each request, the routing and middlewares of an aiohttp
`Application` would cost as much as relaying thirty tokens.
"""

import structlog
from aiohttp import web

from controller.frontend.director import Director
from controller.frontend.errors import ApiError, internal, quoted
from controller.frontend.http.credentials import ApiKeys
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.responses import refusal
from controller.frontend.http.route_explanation import explain
from controller.frontend.http.routes import ROUTE_OF, ROUTES, templated
from controller.frontend.openai.request_head import credentials, id_header, is_messages
from events.process import admin_guard
from events.process.admin_guard import own_hosts

log = structlog.get_logger(__name__)

# paths of health probes, which need no API key
OPEN_PATHS = frozenset(("/health", "/ready", "/live", "/ping"))


class Api:
    """Handles the HTTP requests of a frontend on its API port and on its admin port."""

    def __init__(self, director: Director) -> None:
        """Serve requests through `director`, which contains the components of this frontend."""
        self.director = director
        self.openai = OpenAiEndpoints(director)
        key_file = director.settings.admin_key_file
        self._admin_keys = ApiKeys(key_file) if key_file else None
        self._hosts = own_hosts()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle one request on the API port and return its response."""
        cors = self.openai.cors
        asked = cors.preflight(request.headers) if request.method == "OPTIONS" else None
        response = await self._handle(request, admin=False) if asked is None else asked
        response.headers.update(cors.headers(request.headers.get("Origin", "")))
        return response

    async def _handle(self, request: web.BaseRequest, *, admin: bool) -> web.StreamResponse:
        # for HEAD, aiohttp omits the body of the response
        method = "GET" if request.method == "HEAD" else request.method
        route, keys = ROUTE_OF.get((method, templated(request.path))), self.openai.keys
        if route is not None and route.admin and not (admin or self.director.settings.admin_api):
            route = None
        try:
            if not admin and keys is not None and request.path not in OPEN_PATHS:
                keys.check(credentials(request.headers))
            if route is None:
                raise _nowhere(request)
            return await route.handler(self.openai, request)
        except ApiError as error:
            return refusal(error, id_header(request), messages=is_messages(request.path))
        except Exception:  # an internal error: this client gets a 500, other clients are not affected
            known = "" if route is None else route.path  # not text from the client
            log.exception("request_failed", path=known)
            transport = request.transport
            if request.writer.output_size or transport is None or transport.is_closing():
                raise
            return refusal(internal(), id_header(request), messages=is_messages(request.path))

    async def admin(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle one request on the admin port, which serves all routes except the routes of the OpenAI API."""
        path = templated(request.path)
        try:
            if why := self._refusal(request):
                raise ApiError(403, why, code="admin_refused")
            if (request.method, path) == ("POST", "/route"):
                return web.json_response(await explain(self.openai, request))
            if path.startswith("/v1/") or any(route.api and route.path == path for route in ROUTES):
                why = "this is the admin port; the API is on the frontend's own port"
                raise ApiError(404, why, code="unknown_url")
        except ApiError as error:
            return refusal(error, {})
        return await self._handle(request, admin=True)

    def _refusal(self, request: web.BaseRequest) -> str:
        """Return why a request on the admin port is refused, or an empty string if the request is permitted."""
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
        return "requests from another host need an admin key (--admin-key-file): Authorization: Bearer KEY"


def _nowhere(request: web.BaseRequest) -> ApiError:
    """Return the error for a request without a route: 405 if its path supports other methods, otherwise 404."""
    path, asked = quoted(request.path), templated(request.path)
    methods = [route.method for route in ROUTES if route.path == asked and not route.admin]
    if methods:
        allowed = ", ".join(f"{one}, HEAD" if one == "GET" else one for one in methods)
        why = f"{path} supports only {' or '.join(methods)}"
        return ApiError(405, why, code="method_not_allowed", allow=allowed)
    return ApiError(404, f"unknown path: {request.method} {path}", code="unknown_url")
