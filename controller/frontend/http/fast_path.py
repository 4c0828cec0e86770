"""The fast path: serves a client connection without aiohttp while its requests are plain.

    a completion request, HTTP/1.1, with nothing unusual in its head ──▶ OpenAiEndpoints.answer ──▶ a stream, or one response
    anything else, or pipelined data ──▶ the connection is handed over to aiohttp permanently

`OpenAiEndpoints.answer` handles the request. The fast path saves 105,000 of 907,000 machine instructions per request
(benchmark `request_cost`). aiohttp wakes two tasks for a request, and creates a reader, a writer, a request, a response and two
multidicts. None of these is needed if the whole request has arrived and its head was parsed before (`HeadCache`).

Heads are parsed exactly as by aiohttp, because aiohttp's own parser reads each new head. A request that is not plain
is handed over unread, from its first byte, together with all data after it.
"""

import asyncio
import socket
from dataclasses import dataclass, field
from typing import cast

from aiohttp import web

from controller.frontend.http.client_handler import OpenConnections
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.responses import encoded_response
from controller.frontend.openai.request_head import Head, HeadCache

# Limit in bytes of a request on the fast path, and of pipelined data. Above the limit, reading pauses. A client that
# disconnects during the pause is noticed only when reading resumes.
BYTES_MAX = 2**18
HEAD_BYTES_MAX = 2**13  # longest head that is cached
# seconds to wait for a body after its head; then aiohttp waits for the body, with its own deadline
PATIENCE_S = 1.0
_END = b"\r\n\r\n"


@dataclass(slots=True, eq=False, repr=False)
class FastPathConnection(asyncio.Protocol):
    """Serves one client connection to the port that all frontends of a host share, without aiohttp."""

    _endpoints: OpenAiEndpoints
    _heads: HeadCache
    _aiohttp: web.Server  # serves a connection with any request that is not plain
    _connections: "set[FastPathConnection]"  # the open connections on the fast path
    _clients: OpenConnections  # counts these connections, and those that were handed over to aiohttp
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    transport: asyncio.Transport = field(init=False)
    buffer: bytearray = field(default_factory=bytearray)  # received bytes that are not processed yet
    _incomplete: Head | None = None  # head of the buffered request, while its body is incomplete
    _body_timer: asyncio.TimerHandle = field(init=False)
    _answering: asyncio.Task[None] | None = None
    _idle_since: float = 0.0  # loop time of the end of the last response, or of the connection's start
    _idle_timer: asyncio.TimerHandle = field(init=False)
    _closing: bool = False  # close the connection after the response in progress
    _writing_paused: bool = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register a new connection."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        if not self._clients.enter(self.transport):
            return
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._idle_since = self._loop.time()
        self._idle_timer = self._loop.call_later(self._clients.settings.idle_s, self._check_idle)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Process received bytes: a request, a part of one, or pipelined data."""
        if self not in self._connections:  # the connection was refused
            return
        if self._answering is not None:
            self.buffer += data
            if len(self.buffer) > BYTES_MAX:
                self.transport.pause_reading()
            return
        head, size = self._incomplete, len(self.buffer) + len(data)
        # Clients that have not read their last response are served by aiohttp.
        if head is None and not self._writing_paused:
            head = self._heads.read(data[: data.find(_END, 0, HEAD_BYTES_MAX) + len(_END)])
        if head is None or head.whole > BYTES_MAX or size > head.whole:
            self._hand_over(data)
        elif size < head.whole:
            self.buffer += data
            if self._incomplete is None:
                self._incomplete = head
                self._body_timer = self._loop.call_later(PATIENCE_S, self._hand_over)
        else:
            if self._incomplete is not None:
                self._incomplete = None
                self._body_timer.cancel()
                data, self.buffer = bytes(self.buffer) + data, bytearray()
            self._answering = self._loop.create_task(self._answer(head, data[head.end :]))

    async def _answer(self, head: Head, body: bytes) -> None:
        """Send the response to a request. This task is cancelled if the client disconnects."""
        transport = self.transport
        try:
            response = await self._endpoints.answer(head, body, transport)
            if response is not None and not transport.is_closing():
                transport.write(encoded_response(response))
        except BaseException:
            transport.close()  # it is unknown how much of the response was sent
            raise
        finally:
            self._answering = None
        if transport.is_closing():
            return
        self._idle_since = self._loop.time()
        if self._closing:
            transport.close()
        elif self.buffer:
            self._hand_over()

    def _hand_over(self, data: bytes = b"") -> None:
        """Hand the connection over to aiohttp, with all received bytes that do not belong to a finished request."""
        self._leave()
        transport, other = self.transport, self._aiohttp()
        transport.set_protocol(other)
        other.connection_made(transport)
        if self._writing_paused:
            other.pause_writing()
        transport.resume_reading()
        other.data_received(bytes(self.buffer) + data)

    def _check_idle(self) -> None:
        """Close the connection if it has been idle for `idle_s`, otherwise check again after the rest of that time."""
        busy = self._answering is not None or self.buffer
        idle = 0.0 if busy else self._loop.time() - self._idle_since
        left = self._clients.settings.idle_s - idle
        if left <= 0:
            self.transport.close()
        else:
            self._idle_timer = self._loop.call_later(left, self._check_idle)

    def end(self) -> "asyncio.Task[None] | None":
        """Close the connection: at once, or after a response in progress.

        Return the task of that response, or None if no response is in progress.
        """
        self._closing = True
        if self._answering is None:
            self.transport.close()
        return self._answering

    def pause_writing(self) -> None:
        """Record that the write buffer is full, because the client reads slowly. `SseStream` limits the buffered data."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Record that the client has read the buffered data."""
        self._writing_paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Deregister the connection and cancel its response."""
        self._leave()
        if self._answering is not None:
            self._answering.cancel()

    def _leave(self) -> None:
        if self not in self._connections:
            return
        self._connections.discard(self)
        self._clients.leave(self.transport)
        self._idle_timer.cancel()
        if self._incomplete is not None:
            self._body_timer.cancel()
