"""Builds HTTP responses and CORS headers, and encodes responses for writing without aiohttp."""

from collections.abc import Collection, Mapping
from email.utils import formatdate

import msgspec
from aiohttp import web
from aiohttp.http import SERVER_SOFTWARE

from controller.frontend.errors import ApiError
from controller.frontend.openai.messages.errors import error_body

JSON = "application/json"
EXPOSED = (
    "X-Request-Id, request-id, X-Holdfast-Worker, X-Holdfast-Mode, X-Holdfast-Exact, X-Holdfast-Suspect, X-Holdfast-Refused, "
    "X-Holdfast-Explain, Warning, Retry-After, retry-after-ms"
)
PREFLIGHT_S = 600  # seconds that a browser caches the preflight response


def json_answer(body: bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> web.Response:
    """Return a response with this JSON body."""
    return web.Response(status=status, body=body, content_type=JSON, headers=headers)


def refusal(error: ApiError, headers: Mapping[str, str], *, messages: bool = False) -> web.Response:
    """Return an error as an HTTP response with a JSON body: OpenAI's, or that of the Messages API."""
    body = msgspec.json.encode(error_body(error, headers["X-Request-Id"])) if messages else error.encoded()
    return json_answer(body, {**headers, **error.headers}, error.status)


def encoded_response(response: web.Response) -> bytes:
    """Return the bytes of a response as aiohttp would write them."""
    body = response.body
    assert isinstance(body, bytes)
    headers = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
    return (
        f"HTTP/1.1 {response.status} {response.reason}\r\n{headers}Content-Length: {len(body)}\r\n"
        f"Date: {formatdate(usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n\r\n"
    ).encode() + body


class Cors:
    """Cross-origin resource sharing: decides which web pages may use the API, by their origin."""

    def __init__(self, origins: Collection[str]) -> None:
        """Allow these origins, such as https://app.example.com; `*` allows all. Without origins, CORS is off."""
        self._any = "*" in origins
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def headers(self, origin: str) -> dict[str, str]:
        """Return the CORS headers of a response to a page of this origin, or {} if the page may not use the API."""
        if not origin or not (self._any or origin.lower() in self._origins):
            return {}
        allowed = "*" if self._any else origin
        return {
            "Access-Control-Allow-Origin": allowed,
            "Access-Control-Expose-Headers": EXPOSED,
            "Vary": "Origin",
        }

    def preflight(self, headers: Mapping[str, str]) -> web.Response | None:
        """Return the response to a CORS preflight request. Return None for other requests, or if CORS is off."""
        if not self._origins or "Access-Control-Request-Method" not in headers:
            return None
        allowed = self.headers(headers.get("Origin", ""))
        if not allowed:
            return web.Response(status=403)
        wanted = headers.get("Access-Control-Request-Headers", "")
        more = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": wanted or "Authorization, Content-Type",
            "Access-Control-Max-Age": str(PREFLIGHT_S),
        }
        return web.Response(status=204, headers={**allowed, **more})
