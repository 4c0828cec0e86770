"""HTTP client for an OpenAI-compatible server, with reused connections and streamed answers."""

import asyncio
import io
import json
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from yarl import URL

from events.errors import HoldfastError, UsageError

now = time.perf_counter  # the clock of all measurements; tests replace it
Now = Callable[[], float]
"""A function that returns the current time of a clock, in seconds."""
Take = Callable[[bytes, float], None]
"""A callback that gets each event of an answer (without the prefix `data:`) and the time at which the event arrived."""
ASK_S_MAX = 10.0
CLOSE_S = 1.0
NOT_HTTP = "the response is not HTTP/1.1"
WORDS_MAX = 200  # maximum characters of a server's text
Fault = Literal["", "unreachable", "timeout", "broke off", "malformed"]


class BadEndpoint(HoldfastError):
    """The endpoint cannot be reached, or is not OpenAI-compatible."""


class _Malformed(Exception):
    """The response is not HTTP/1.1, a part of it is larger than a limit, or one of its events cannot be parsed."""


@dataclass(frozen=True, slots=True)
class Reply:
    """How a request ended. `fault` is empty if a complete response arrived, even one with an error status.

    `began` and `ended` are times of the client's clock, in seconds. `body` is empty if events were streamed.
    """

    began: float
    ended: float
    status: int = 0
    body: bytes = b""
    fault: Fault = ""
    detail: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits of a client: times in seconds, and sizes of the parts of a response in bytes."""

    connect_s: float = 10.0
    idle_s: float = 3.0  # longest idle time before reuse; servers close idle connections, uvicorn after 5 s
    turn_s: float = 0.05  # longest time of processing answers in one iteration of the event loop
    line: int = 64 << 10  # a line of the response's head
    body: int = 16 << 20  # body of a response that is not an event stream
    event: int = 1 << 20


class LoopTurn:
    """Limits how long one iteration of the event loop processes arrived data.

        process ── turn_s over ──▶ all other answers wait ── next iteration ──▶ process

    The limit is needed because timers, due requests and signals wait for the end of an iteration. Data that waits stays in
    buffers of limited size. The time at which data is processed is recorded as its arrival time. This time is too late by at
    most `behind_s`.
    """

    def __init__(self, now: Now, turn_s: float) -> None:
        self._now, self._turn_s = now, turn_s
        self._began = 0.0  # 0: nothing was processed in this iteration
        self._behind_since = 0.0  # 0: everything that had arrived was processed in the last iteration
        self._is_over = False

    async def wait(self) -> float:
        """Wait until arrived data may be processed, and return the time at the end of the wait."""
        while True:
            at = self._now()
            if not self._began:
                self._began = at
                asyncio.get_running_loop().call_soon(self._end)
            if at - self._began <= self._turn_s:
                return at
            self._is_over = True
            self._behind_since = self._behind_since or self._began
            await asyncio.sleep(0)

    def _end(self) -> None:
        self._behind_since = self._behind_since if self._is_over else 0.0
        self._began, self._is_over = 0.0, False

    def behind_s(self) -> float:
        """Return for how many seconds, at most, arrived data has waited to be processed; 0 if none waits."""
        return self._now() - self._behind_since if self._behind_since else 0.0


class ReplayTarget:
    """The HTTP client of one server. It opens a connection for each concurrent request, and keeps idle connections for reuse."""

    def __init__(
        self, url: str, key: str = "", now: Now = now, limits: ClientLimits = ClientLimits()
    ) -> None:
        """Prepare requests to the server at `url` with the API key `key`. Raise UsageError if the URL or the key is invalid."""
        self._now, self._limits = now, limits
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
            (host or "").encode("idna")
        except ValueError:  # a port that is not a number, or an invalid host name
            host = None
        if not host or parts.scheme not in ("http", "https") or not url.isascii() or " " in url:
            raise UsageError(f"--url {url!r} is not the URL of a server, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        if not key.isascii() or not key.isprintable():
            raise UsageError("the API key has characters that are not allowed in an HTTP header")
        self._base = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{urlsplit(self.url).path}"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._turn = LoopTurn(now, limits.turn_s)
        self._is_hushed = False
        # opened by the first request, in its event loop: one session that keeps connections, and one that keeps none
        self._kept: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        take: Take | None = None,
        deadline_s: float = ASK_S_MAX,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send a request, wait for the end of its answer, and return how the request ended.

        Failures are returned, not raised. `take` receives the answer's events as they arrive.
        """
        began, answer = self._now(), _Answer(take, self._limits)
        content = {"Content-Type": "application/json"} if body else {}
        fault: Fault = ""
        detail = ""
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._response(method, path, body, {**content, **(headers or {})})
                async with response:
                    await self._read(response, answer)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            reason = _reason(error.__cause__, self._limits.connect_s)
            return Reply(began, self._now(), fault="unreachable", detail=reason)
        except TimeoutError:
            return Reply(began, self._now(), fault="timeout", detail=f"no end within {deadline_s:g} s")
        except _Malformed as error:
            fault, detail = "malformed", str(error)
        except aiohttp.ClientResponseError:
            fault, detail = "malformed", NOT_HTTP
        except (aiohttp.ClientError, OSError):
            fault, detail = "broke off", "the connection closed"
        return Reply(began, self._now(), answer.status, bytes(answer.body), fault, detail, answer.headers)

    async def _response(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Send a request, and return the response as soon as its head has been read.

        A server can close a kept connection just when the client reuses it, and some servers (llama-server) never announce the
        closing. If a kept connection breaks before a response has begun, this method sends the request once more, on a new
        connection. In addition, aiohttp itself repeats a GET once.
        """
        self._kept = self._kept or self._opened(keeps=True)
        connection = SimpleNamespace(is_kept=False)
        try:
            return await self._send(self._kept, method, path, body, headers, connection)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            # aiohttp reports the part of a head that has arrived in place of a message
            begun = isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)
            if begun or not connection.is_kept:
                raise
        self._fresh = self._fresh or self._opened(keeps=False)
        return await self._send(self._fresh, method, path, body, headers, connection)

    async def _send(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        connection: SimpleNamespace,
    ) -> aiohttp.ClientResponse:
        return await session.request(
            method,
            URL(self._base + path, encoded=True),
            data=io.BytesIO(body) if body else None,
            headers=headers,
            allow_redirects=False,
            trace_request_ctx=connection,
        )

    async def _read(self, response: aiohttp.ClientResponse, answer: "_Answer") -> None:
        """Read a response to its end. Raise ClientError if the connection fails, or _Malformed if the response is not valid."""
        answer.begin(response)
        with _failing_when_closed(response):
            async for data in response.content.iter_any():
                at = await self._turn.wait()
                if self._is_hushed:
                    # until cancelled; the socket is no longer read once its buffer is full
                    await asyncio.Event().wait()
                answer.feed(data, at)

    def _opened(self, *, keeps: bool) -> aiohttp.ClientSession:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        # not aiohttp's own context, which is created at import, possibly without trusted certificates
        tls = ssl.create_default_context() if self._base.startswith("https") else False
        return aiohttp.ClientSession(
            # a name is resolved only once, because a thread per connection would be too slow
            connector=_Connector(
                ssl=tls,
                keepalive_timeout=self._limits.idle_s if keeps else None,
                force_close=not keeps,
                limit=0,
                ttl_dns_cache=None,
            ),
            headers=self._headers,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._limits.connect_s),
            trace_configs=[tracing],
            max_line_size=self._limits.line,
            max_field_size=self._limits.line,
        )

    async def model(self, wanted: str) -> dict[str, object]:
        """Return the entry of a model in the server's list of models. An empty `wanted` selects the only model.

        Raise BadEndpoint if the list cannot be read or does not have the model, or if `wanted` is empty and the server serves
        several models.
        """
        reply = await self.ask("GET", "/v1/models")
        if reply.fault:
            raise BadEndpoint(f"{self.url} cannot be reached: {reply.detail}")
        if reply.status != 200:
            raise BadEndpoint(f"{self.url}/v1/models answers {reply.status}: {words(reply.body)}")
        try:
            listed = {str(one["id"]): one for one in json.loads(reply.body)["data"]}
        except (ValueError, LookupError, TypeError):
            raise BadEndpoint(
                f"{self.url}/v1/models is not the answer of an OpenAI-compatible server"
            ) from None
        if not listed or (wanted and wanted not in listed):
            serves = ", ".join(listed) or "no model"
            raise BadEndpoint(f"{self.url} serves {serves}" + (f", not {wanted}" if wanted else ""))
        if not wanted and len(listed) > 1:
            raise BadEndpoint(
                f"{self.url} serves several models: choose one with --model ({', '.join(listed)})"
            )
        name = wanted or next(iter(listed))
        return {**listed[name], "id": name}

    async def __aenter__(self) -> "ReplayTarget":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def hush(self) -> None:
        """Discard all data that arrives from now on, on all connections. A signal handler may call this method."""
        self._is_hushed = True

    def behind_s(self) -> float:
        """Return for how many seconds, at most, arrived data has waited to be processed; 0 if none waits."""
        return self._turn.behind_s()

    async def close(self) -> None:
        """Close all connections, also those of requests that were just cancelled."""
        await asyncio.sleep(0)  # cancelled requests give up their connections
        for session in (self._kept, self._fresh):
            if session is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        await session.close()


class _Connector(aiohttp.TCPConnector):
    """Aborts the connections that are not kept for reuse.

    aiohttp itself would close them, and wait until the server has read the request.
    """

    def _release(self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        drops = should_close or protocol.should_close or self.force_close
        if drops:
            protocol.abort()
        super()._release(key, protocol, should_close=drops)


class _Answer:
    """A response as it arrives: its head, its body, or its events (server-sent events)."""

    def __init__(self, take: Take | None, limits: ClientLimits) -> None:
        self._take, self._limits = take, limits
        self._line = b""  # the beginning of an incomplete line of events
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.body = bytearray()

    def begin(self, response: aiohttp.ClientResponse) -> None:
        """Store the status and headers of the response, and decide whether its body is read as a stream of events.

        With status 200, every body that is not declared as JSON is read as a stream of events. Some servers do not declare the
        type of a stream.
        """
        self.status, self.headers = response.status, response.headers
        if response.status != 200 or response.content_type == "application/json":
            self._take = None

    def feed(self, data: bytes, at: float) -> None:
        """Process the next bytes of the body, which arrived at the time `at`.

        Raise _Malformed if a limit is exceeded, or if `take` raises ValueError.
        """
        if self._take is None:
            self.body += data
        else:
            *lines, self._line = (self._line + data).split(b"\n")
            for line in lines:
                if line[:5] == b"data:":
                    try:
                        self._take(line[5:].strip(), at)
                    except ValueError as error:
                        raise _Malformed(f"an event cannot be parsed: {error}") from error
        if len(self.body) > self._limits.body or len(self._line) > self._limits.event:
            raise _Malformed(NOT_HTTP)


@contextmanager
def _failing_when_closed(response: aiohttp.ClientResponse) -> Iterator[None]:
    """While the context is open, let the reading of the body fail when the connection closes.

    aiohttp itself does not report the closed connection if the length of a chunk is invalid.
    """

    def fail(_: object) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(_Malformed(NOT_HTTP))

    content, connection = response.content, response.connection
    protocol = connection.protocol if connection is not None else None
    closed = protocol.closed if protocol is not None else None  # None: the connection is closed already
    if closed is None:
        fail(closed)
        yield
        return
    closed.remove_done_callback(_retrieve)
    closed.add_done_callback(_retrieve)
    closed.add_done_callback(fail)
    try:
        yield
    finally:
        closed.remove_done_callback(fail)


def _retrieve(closed: asyncio.Future[None]) -> None:
    """Retrieve the error with which a connection closed, because asyncio logs errors that are not retrieved."""
    closed.exception()


async def _note_reuse(session: aiohttp.ClientSession, context: SimpleNamespace, event: object) -> None:
    context.trace_request_ctx.is_kept = True


def words(body: bytes) -> str:
    """Return the error message in a response body, or the whole body if it has no message, as one short line."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"]) if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError):
        text = body.decode("utf-8", "replace")
    return printable(text)[:WORDS_MAX] or "nothing"


def printable(text: str) -> str:
    """Return a text as one line without characters that would control a terminal."""
    return "".join(one if one.isprintable() else "\ufffd" for one in " ".join(text.split()))


def _reason(error: BaseException | None, within_s: float) -> str:
    if not isinstance(error, OSError) or isinstance(error, TimeoutError):
        return f"no connection within {within_s:g} s"
    if (error.errno or 0) > 0 and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno or 0)
    return error.strerror or str(error) or type(error).__name__
