"""The console over HTTP, on a frontend's admin port: its page, what flows to it, and what it asks for.

GET  /console                       the page; /console/console.js, /console/console.css
GET  /console/events                server-sent events: hello, snapshot, changes, beat
GET  /console/report?incident=ID    a post-mortem as of now; ?since=WHEN
GET  /console/request?id=ID         what became of a request, as JSON
POST /console/act                   drain, resume, move or restart a worker; only where that is allowed
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import structlog
from aiohttp import web

from controller.console import guard
from controller.console.actions import READ_ONLY, ActionUnclear, WorkerAct, understood
from controller.console.feed import ConsoleFeed, TooManyLook, event
from controller.console.history import HistoryBusy, HistoryReader, HistorySilent
from controller.replay.report.figure import COLORS
from events.errors import HoldfastError

PATH = "/console"
WRITE_S = 20.0  # for one who looks to read anything at all
ACT_S = 15.0
BODY_S = 5.0
BODY_BYTES_MAX = 4096

USUAL = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
PAGE = USUAL | {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
}
# A post-mortem is one file with its script in it. In a sandbox it has no origin, and so cannot ask the console for anything.
REPORT = USUAL | {
    "Content-Security-Policy": "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; frame-ancestors 'none'"
}
ASSETS = {"console.js": "text/javascript", "console.css": "text/css"}

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
log = structlog.get_logger(__name__)


@cache
def _asset(name: str) -> bytes:
    """Return a file of the page; the style goes on from that of a post-mortem."""
    text = (files(__package__) / name).read_bytes()
    if name == "console.css":
        text = (files("controller.replay.report") / "report.css").read_bytes() + text
    return text


@dataclass(slots=True)
class ConsoleEndpoints:
    """Answers what is asked below `PATH`."""

    feed: ConsoleFeed
    history: HistoryReader
    running: Callable[[str], Sequence[str]]  # by which workers a request is answered here now, in words
    name: str  # of this frontend
    names: frozenset[str]  # of its host
    act: WorkerAct | None = None  # None: it shows, and does nothing
    _token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def serves(self, path: str) -> bool:
        """Say whether a path is the console's."""
        return path == PATH or path.startswith(f"{PATH}/")

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        if request.path == f"{PATH}/act":
            return await self._act(request)
        if why := guard.refusal(request.headers, self.names):
            return _said(403, f"The console does not answer: {why}.")
        if request.method not in ("GET", "HEAD"):
            return _said(405, "The console only answers GET.", {"Allow": "GET, HEAD"})
        name = request.path.removeprefix(PATH).removeprefix("/")
        if name in ASSETS:
            return web.Response(body=_asset(name), content_type=ASSETS[name], charset="utf-8", headers=PAGE)
        match request.path:
            case "/console":
                body = _asset("console.html")
                return web.Response(body=body, content_type="text/html", charset="utf-8", headers=PAGE)
            case "/console/":
                return web.Response(status=308, headers=USUAL | {"Location": "../console"})
            case "/console/events":
                return await self._events(request)
            case "/console/report":
                return await self._report(request.query)
            case "/console/request":
                return await self._request(request.query)
            case _:
                return _said(404, "The console has no such page: it is at /console.")

    async def _events(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            with self.feed.looking() as told:
                response = web.StreamResponse(headers=USUAL | {"Content-Type": "text/event-stream"})
                if request.method == "HEAD":
                    return web.Response(headers=response.headers)
                await response.prepare(request)
                await response.write(self._hello())
                async for said in told:
                    async with asyncio.timeout(WRITE_S):
                        await response.write(said)
                return response
        except TooManyLook as error:
            return _said(503, str(error), {"Retry-After": "10"})
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()  # who does not read comes back, and begins anew
            return response

    def _hello(self) -> bytes:
        """Say who shows it, in which colours, and, to who may act, by which word."""
        said = {"frontend": self.name, "colors": COLORS, "token": self._token if self.act is not None else ""}
        return event("hello", said)

    async def _report(self, query: Mapping[str, str]) -> web.Response:
        incident, since = query.get("incident", ""), query.get("since", "")
        if bool(incident) == bool(since):
            return _said(400, "Either ?incident=ID or ?since=WHEN (10m, 12:00:03) is wanted.")
        try:
            page = await self.history.report(incident=incident, since=since)
        except HistoryBusy as error:
            return _said(503, str(error), {"Retry-After": "5"})
        except HistorySilent as error:
            return _said(404, f"There is no such post-mortem: {error}")
        return web.Response(body=page, content_type="text/html", charset="utf-8", headers=REPORT)

    async def _request(self, query: Mapping[str, str]) -> web.Response:
        id = query.get("id", "")
        try:
            story = await self.history.story(id)
            return web.json_response(story | {"now": self.running(id.strip())}, headers=USUAL)
        except HistoryBusy as error:
            return _error(503, str(error))
        except HistorySilent as error:
            return _error(404, str(error))

    async def _act(self, request: web.BaseRequest) -> web.Response:
        if request.method != "POST":
            return _error(405, "POST is wanted", {"Allow": "POST"})
        if self.act is None:
            return _error(403, READ_ONLY)
        if why := guard.refusal_to_act(request.headers, self.names, self._token):
            return _error(403, f"this is not done: {why}")
        try:
            async with asyncio.timeout(BODY_S):
                action = understood(await _body(request))
        except ActionUnclear as error:
            return _error(400, str(error))
        except TimeoutError:
            return _error(408, f"the body has not come within {BODY_S:g} s")
        by = f"console of {self.name}, {request.remote or 'somebody'}"
        try:
            async with asyncio.timeout(ACT_S):
                said = await self.act(action.verb, action.body(by))
        except HoldfastError as error:
            log.info("console_action_failed", verb=action.verb, worker=action.worker, by=by, why=str(error))
            return _error(409, str(error))
        except TimeoutError:
            return _error(504, f"nobody has said within {ACT_S:g} s whether it was done: the events tell")
        log.info("console_action", verb=action.verb, worker=action.worker, by=by)
        return web.json_response({"says": said}, headers=USUAL)


async def _body(request: web.BaseRequest) -> bytes:
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise ActionUnclear(f"the body has more than {BODY_BYTES_MAX} bytes")
    return bytes(body)


def _said(status: int, text: str, more: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=f"{text}\n", headers=USUAL | dict(more or {}))


def _error(status: int, text: str, more: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response({"error": text}, status=status, headers=USUAL | dict(more or {}))
