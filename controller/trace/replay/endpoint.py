"""HTTP client for an OpenAI-compatible server, with reused connections and streamed answers."""

import asyncio
import json
import os
import socket
import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from controller.trace.replay.connection import ClientConnection, How, now
from controller.trace.replay.response import Now, Take
from events.errors import HoldfastError, UsageError

TURN_S = 0.05  # longest time of reading in one iteration of the event loop


class LoopTurn:
    """Limits how long one iteration of the event loop reads from all connections of a server.

        read ── TURN_S over ──▶ cut: all reading is paused ── next iteration ──▶ read

    The limit is needed because timers, due requests and signals wait for the end of an iteration. While reading is paused,
    arrived data waits in the kernel, or in the server if the kernel's buffers are full. Such data gets the time at which it is
    finally read. `behind_s` reports how late this time may be.
    """

    def __init__(
        self, connections: Collection[ClientConnection], now: Now = now, turn_s: float = TURN_S
    ) -> None:
        self._connections = connections
        self._now = now
        self._turn_s = turn_s
        self._began = 0.0  # 0: nothing was read in this iteration
        self._cut = False
        self._behind_since = 0.0  # 0: everything that had arrived was read in the last iteration

    def read(self) -> None:
        """Record that a connection has read its arrived data. After the time limit, pause reading on all connections."""
        at = self._now()
        if not self._began:
            self._begin(at)
        elif not self._cut and at - self._began > self._turn_s:
            self._cut = True
            self._behind_since = self._behind_since or self._began
            for connection in self._connections:
                connection.pause()

    def behind_s(self) -> float:
        """Return for how many seconds arrived data may have waited to be read; 0 if none waits."""
        return self._now() - self._behind_since if self._behind_since else 0.0

    def _begin(self, at: float) -> None:
        self._began = at
        asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        if not self._cut:
            self._began = self._behind_since = 0.0
            return
        self._cut = False
        self._begin(self._now())  # if no data arrives in this iteration, its end shows that none was waiting
        for connection in tuple(self._connections):
            connection.resume()


ASK_S_MAX = 10.0
WORDS_MAX = 200  # maximum characters of a server's text

Fault = Literal["", "unreachable", "timeout", "broke off", "malformed"]
_FAULTS: dict[How, Fault] = {"whole": "", "malformed": "malformed", "broke": "broke off", "": "broke off"}


class BadEndpoint(HoldfastError):
    """The endpoint cannot be reached, or is not OpenAI-compatible."""


class _Unreachable(Exception):
    """No connection could be made."""


@dataclass(frozen=True, slots=True)
class Reply:
    """How a request ended. `fault` is empty if a complete response arrived, even one with an error status.

    `began` and `ended` are times of the client's clock, in seconds.
    """

    began: float
    ended: float
    status: int = 0
    body: bytes = b""
    fault: Fault = ""
    detail: str = ""
    head: bytes = b""

    def header(self, name: str) -> str:
        """Return the value of a response header; "" if it is missing."""
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.strip().lower() == name.lower():
                return value.strip()
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Time limits of a connection, in seconds."""

    connect_s: float = 10.0
    idle_s: float = 3.0  # longest idle time before reuse; servers close idle connections, uvicorn after 5 s
    turn_s: float = TURN_S


class ReplayTarget:
    """The client of one server. It opens a connection for each concurrent request, and keeps connections for reuse."""

    def __init__(
        self,
        url: str,
        key: str = "",
        now: Now = now,
        limits: ConnectionLimits = ConnectionLimits(),
    ) -> None:
        """Use a server's URL and API key. Raise UsageError if either is invalid."""
        self._now, self._limits = now, limits
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")
        except ValueError:  # a port that is not a number, or an invalid host name
            host, port = None, None
        if not host or parts.scheme not in ("http", "https") or not url.isascii() or " " in url:
            raise UsageError(f"--url {url!r} is not the URL of a server, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._host, self._secure = host, parts.scheme == "https"
        self._port = port or (443 if self._secure else 80)
        self._path = urlsplit(self.url).path
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept: */*\r\n{authorization}"
        if not key.isascii() or not key.isprintable():
            raise UsageError("the API key has characters that are not allowed in an HTTP header")
        self._tls = ssl.create_default_context() if self._secure else None
        self._addresses: list[str] = []
        self._idle: list[ClientConnection] = []
        self._open = set[ClientConnection]()
        self._turn = LoopTurn(self._open, now, limits.turn_s)

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
        """Send a request, wait for the end of its answer, and return how it ended. Failures are returned, not raised.

        `take` receives the answer's events as they arrive.
        """
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        content = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{extra}{content}\r\n"
        began = self._now()
        try:
            async with asyncio.timeout(deadline_s):
                connection = await self._request(head.encode() + body, take)
        except TimeoutError:
            return Reply(began, self._now(), fault="timeout", detail=f"no end within {deadline_s:g} s")
        except _Unreachable as error:
            return Reply(began, self._now(), fault="unreachable", detail=str(error))
        fault = _FAULTS[connection.how]
        detail = {"malformed": "the response is not HTTP/1.1", "broke off": "the connection closed"}.get(
            fault, ""
        )
        response = connection.response
        return Reply(began, connection.ended, response.status, response.body, fault, detail, response.head)

    async def _request(self, data: bytes, take: Take | None) -> ClientConnection:
        """Send a request, wait for the end of its answer, and return its connection. Raise _Unreachable.

        A server may close a kept connection just when it is reused, and some servers never announce this (llama-server). If a
        kept connection breaks before a byte of an answer has arrived, the request is sent once more, on a new connection.
        """
        kept = self._kept()
        if kept is not None:
            await self._exchange(kept, data, take)
            if kept.how != "broke" or kept.received:
                return kept
        try:
            connection = await self._connected()
        except OSError as error:
            raise _Unreachable(_reason(error, self._limits.connect_s)) from error
        self._open.add(connection)
        await self._exchange(connection, data, take)
        return connection

    async def _exchange(self, connection: ClientConnection, data: bytes, take: Take | None) -> None:
        try:
            await connection.send(data, take)
        finally:
            if connection.closed or connection.how != "whole":
                self._drop(connection)
            else:
                self._idle.append(connection)

    def _kept(self) -> ClientConnection | None:
        """Return the idle connection that was used last, and close those that were idle for too long. None if none is left."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and self._now() - connection.idle_since < self._limits.idle_s:
                return connection
            self._drop(connection)
        return None

    async def _connected(self) -> ClientConnection:
        """Open a new connection to the server. Raise OSError if it cannot be opened."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._limits.connect_s):
            if not self._addresses:  # resolved only once, because a thread per connection would be too slow
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                self._addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
            for address in tuple(self._addresses):
                try:
                    _, connection = await loop.create_connection(
                        lambda: ClientConnection(self._turn.read, self._now),
                        address,
                        self._port,
                        ssl=self._tls,
                        server_hostname=self._host if self._secure else None,
                    )
                except OSError as error:
                    failed = error
                else:
                    self._addresses = [address]
                    return connection
        raise failed

    def _drop(self, connection: ClientConnection) -> None:
        connection.close()
        self._open.discard(connection)

    async def model(self, wanted: str) -> dict[str, object]:
        """Return the entry of a model in the server's list of models. An empty `wanted` selects the only model.

        Raise BadEndpoint if the server does not serve the model, or serves several and none is selected.
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
        self.close()

    @property
    def connections(self) -> frozenset[ClientConnection]:
        """The open connections, in use or kept for reuse."""
        return frozenset(self._open)

    def hush(self) -> None:
        """Discard all data that arrives from now on, on all connections. May be called by a signal handler."""
        for connection in tuple(self._open):
            connection.discarding = True

    def behind_s(self) -> float:
        """Return for how many seconds arrived data may have waited to be read; 0 if none waits."""
        return self._turn.behind_s()

    def close(self) -> None:
        """Close all connections."""
        for connection in tuple(self._open):
            self._drop(connection)
        self._idle.clear()


def words(body: bytes) -> str:
    """Return the error message in a response body, or the body itself, as one short line."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"]) if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError):
        text = body.decode("utf-8", "replace")
    return printable(text)[:WORDS_MAX] or "nothing"


def printable(text: str) -> str:
    """Return a text as one line without characters that would control a terminal."""
    return "".join(one if one.isprintable() else "\ufffd" for one in " ".join(text.split()))


def _reason(error: OSError, within_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no connection within {within_s:g} s"
    if (error.errno or 0) > 0 and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno or 0)
    return error.strerror or str(error) or type(error).__name__
