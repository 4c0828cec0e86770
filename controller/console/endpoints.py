"""Serves the console over HTTP, on a frontend's admin port.

Endpoints:

    GET  /console                       the page, with /console/console.js and /console/console.css
    GET  /console/events                server-sent events: hello, snapshot, changes, beat
    GET  /console/report?incident=ID    the post-mortem of an incident; ?since=WHEN: of the time since then
    GET  /console/request?id=ID         the history of a request, as JSON
    POST /console/act                   drain, resume, move or restart a worker, if actions are enabled
"""

import asyncio
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Literal, Protocol, get_args

import structlog
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from controller.console.feed import ConsoleFeed, TooManyViewers, event
from controller.console.history import HistoryBusy, HistoryReader, HistoryUnavailable
from controller.replay.report.figure import COLORS
from events.errors import HoldfastError
from events.process.admin_guard import refusal

PATH = "/console"
WRITE_S = 20.0  # a viewer that reads no data for this many seconds is disconnected
ACT_S = 15.0  # seconds until an action without a result is answered with an error
BODY_S = 5.0  # timeout in seconds for receiving a request body
BODY_BYTES_MAX = 4096

COMMON = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
PAGE = COMMON | {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
}
# A post-mortem page contains its script. The sandbox gives the page no origin, so that the script cannot call the console.
REPORT = COMMON | {
    "Content-Security-Policy": "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; frame-ancestors 'none'"
}
ASSETS = {"console.js": "text/javascript", "console.css": "text/css"}

TOKEN = "X-Holdfast-Console"
Verb = Literal["drain", "resume", "move", "restart"]
READ_ONLY = (
    "this console is read-only: start the fleet with `holdfast up --console-actions` (for a separate frontend: "
    "`--console-actions`, or HOLDFAST_FRONTEND__CONSOLE_ACTIONS=true), or use `holdfast drain` and the other commands"
)

log = structlog.get_logger(__name__)


class ActionUnclear(HoldfastError):
    """The request does not describe an action of the console."""


class WorkerAct(Protocol):
    """Carries out an operator's command on a worker."""

    async def __call__(self, verb: str, body: dict[str, object]) -> str:
        """Carry out a command and return a sentence about its result. Raise HoldfastError with the reason if it failed.

        `body` is the command as the controller receives it."""


class Action(BaseModel):
    """A command about a worker, as the console page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    verb: Verb
    worker: str = Field(min_length=1, max_length=200)
    deadline_s: float | None = Field(default=None, gt=0, le=86_400)  # only for drain
    to: str = Field(default="", max_length=200)  # only for move

    def body(self, by: str) -> dict[str, object]:
        """Return the body of the command as the controller receives it. `by` names the operator."""
        more: dict[str, object] = {}
        if self.verb == "drain":
            more["deadline_s"] = self.deadline_s
        elif self.verb == "move":
            more["to"] = self.to
        return {"worker": self.worker, "by": by, **more}


def parse_action(body: bytes) -> Action:
    """Parse the JSON body of a request for an action. Raise ActionUnclear if the body is invalid."""
    try:
        return Action.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        expected = f'{{"verb": "{" | ".join(get_args(Verb))}", "worker": NAME}}'
        raise ActionUnclear(f"{where}: {first['msg']}; expected {expected}") from None


def refusal_to_act(headers: Mapping[str, str], names: frozenset[str], token: str) -> str:
    """Return why a request for an action is refused, or "" if the action is allowed.

    `names` are the host names of this frontend, and `token` is the secret that the console page sends with each action."""
    if why := refusal(headers, names):
        return why
    host = headers.get("Host", "")
    if headers.get("Origin", "") not in (f"http://{host}", f"https://{host}"):
        return "it does not come from this console's page: its Origin differs"
    if not hmac.compare_digest(headers.get(TOKEN, "").encode(), token.encode()):
        return f"its {TOKEN} does not match this frontend's: reload the page"
    return ""


@cache
def _asset(name: str) -> bytes:
    """Return a file of the console page. `console.css` begins with the style sheet of post-mortem pages."""
    text = (files(__package__) / name).read_bytes()
    if name == "console.css":
        text = (files("controller.replay.report") / "report.css").read_bytes() + text
    return text


@dataclass(slots=True)
class ConsoleEndpoints:
    """Answers the HTTP requests for the console: the paths at and below `PATH`."""

    feed: ConsoleFeed
    history: HistoryReader
    # returns lines about the workers that now generate the answer of a request
    running: Callable[[str], Sequence[str]]
    name: str  # name of this frontend
    names: frozenset[str]  # host names under which this frontend's host is addressed
    act: WorkerAct | None = None  # None: the console is read-only
    _token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def serves(self, path: str) -> bool:
        """Return whether a path belongs to the console."""
        return path == PATH or path.startswith(f"{PATH}/")

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request for the console. Refuse a request from another web site or with an unsupported method."""
        if request.path == f"{PATH}/act":
            return await self._act(request)
        if why := refusal(request.headers, self.names):
            return _text(403, f"The console refuses this request: {why}.")
        if request.method not in ("GET", "HEAD"):
            return _text(405, "The console answers only GET.", {"Allow": "GET, HEAD"})
        name = request.path.removeprefix(PATH).removeprefix("/")
        if name in ASSETS:
            return web.Response(body=_asset(name), content_type=ASSETS[name], charset="utf-8", headers=PAGE)
        match request.path:
            case "/console":
                body = _asset("console.html")
                return web.Response(body=body, content_type="text/html", charset="utf-8", headers=PAGE)
            case "/console/":
                return web.Response(status=308, headers=COMMON | {"Location": "../console"})
            case "/console/events":
                return await self._events(request)
            case "/console/report":
                return await self._report(request.query)
            case "/console/request":
                return await self._request(request.query)
            case _:
                return _text(404, "No such page. The console is at /console.")

    async def _events(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            with self.feed.subscribe() as events:
                response = web.StreamResponse(headers=COMMON | {"Content-Type": "text/event-stream"})
                if request.method == "HEAD":
                    return web.Response(headers=response.headers)
                await response.prepare(request)
                await response.write(self._hello())
                async for data in events:
                    async with asyncio.timeout(WRITE_S):
                        await response.write(data)
                return response
        except TooManyViewers as error:
            return _text(503, str(error), {"Retry-After": "10"})
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()  # the page reconnects, and then gets a new snapshot
            return response

    def _hello(self) -> bytes:
        """Return the first server-sent event: the frontend's name, the colors of states, and the token for actions.

        The token is empty if the console is read-only."""
        body = {"frontend": self.name, "colors": COLORS, "token": self._token if self.act is not None else ""}
        return event("hello", body)

    async def _report(self, query: Mapping[str, str]) -> web.Response:
        incident, since = query.get("incident", ""), query.get("since", "")
        if bool(incident) == bool(since):
            return _text(400, "Give either ?incident=ID or ?since=WHEN (10m, 12:00:03).")
        try:
            page = await self.history.report(incident=incident, since=since)
        except HistoryBusy as error:
            return _text(503, str(error), {"Retry-After": "5"})
        except HistoryUnavailable as error:
            return _text(404, f"No such post-mortem: {error}")
        return web.Response(body=page, content_type="text/html", charset="utf-8", headers=REPORT)

    async def _request(self, query: Mapping[str, str]) -> web.Response:
        id = query.get("id", "")
        try:
            story = await self.history.story(id)
            return web.json_response(story | {"now": self.running(id.strip())}, headers=COMMON)
        except HistoryBusy as error:
            return _error(503, str(error))
        except HistoryUnavailable as error:
            return _error(404, str(error))

    async def _act(self, request: web.BaseRequest) -> web.Response:
        if request.method != "POST":
            return _error(405, "use POST", {"Allow": "POST"})
        if self.act is None:
            return _error(403, READ_ONLY)
        if why := refusal_to_act(request.headers, self.names, self._token):
            return _error(403, f"the action was not carried out: {why}")
        try:
            async with asyncio.timeout(BODY_S):
                action = parse_action(await _body(request))
        except ActionUnclear as error:
            return _error(400, str(error))
        except TimeoutError:
            return _error(408, f"the body did not arrive within {BODY_S:g} s")
        by = f"console of {self.name}, {request.remote or 'unknown address'}"
        try:
            async with asyncio.timeout(ACT_S):
                result = await self.act(action.verb, action.body(by))
        except HoldfastError as error:
            log.info("console_action_failed", verb=action.verb, worker=action.worker, by=by, why=str(error))
            return _error(409, str(error))
        except TimeoutError:
            return _error(
                504, f"no controller reported within {ACT_S:g} s whether it was done; see the events"
            )
        log.info("console_action", verb=action.verb, worker=action.worker, by=by)
        return web.json_response({"says": result}, headers=COMMON)


async def _body(request: web.BaseRequest) -> bytes:
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise ActionUnclear(f"the body is larger than {BODY_BYTES_MAX} bytes")
    return bytes(body)


def _text(status: int, text: str, more: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=f"{text}\n", headers=COMMON | dict(more or {}))


def _error(status: int, text: str, more: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response({"error": text}, status=status, headers=COMMON | dict(more or {}))


__all__ = ["TOKEN", "refusal", "refusal_to_act"]
