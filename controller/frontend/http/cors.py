"""Cross-origin resource sharing: which other sites' pages may use the API. Off unless origins are set."""

from collections.abc import Collection, Mapping

from aiohttp import web

EXPOSED = "X-Request-Id, X-Holdfast-Worker, X-Holdfast-Refused, X-Holdfast-Explain, Warning, Retry-After, retry-after-ms"
PREFLIGHT_S = 600  # that a browser remembers an answer


class Cors:
    """The origins that may use the API."""

    def __init__(self, origins: Collection[str]) -> None:
        """`origins`: such as https://app.example.com; `*`: all."""
        self._any = "*" in origins
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def headers(self, origin: str) -> dict[str, str]:
        """Return what an answer to a page of this origin needs; nothing if it may not use the API."""
        if not origin or not (self._any or origin.lower() in self._origins):
            return {}
        allowed = "*" if self._any else origin
        return {
            "Access-Control-Allow-Origin": allowed,
            "Access-Control-Expose-Headers": EXPOSED,
            "Vary": "Origin",
        }

    def preflight(self, headers: Mapping[str, str]) -> web.Response | None:
        """Return the answer to a browser that asks before it sends a request; None if this is no such question."""
        if "Access-Control-Request-Method" not in headers:
            return None
        allowed = self.headers(headers.get("Origin", ""))
        if not allowed:
            return web.Response(status=403)
        wanted = headers.get("Access-Control-Request-Headers", "")
        more = {
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": wanted or "Authorization, Content-Type",
            "Access-Control-Max-Age": str(PREFLIGHT_S),
        }
        return web.Response(status=204, headers={**allowed, **more})
