"""Client connections that aiohttp serves, with limits of their number and of the wait for a head.

    first byte of a head ── head_s ──▶ 408, unless the head is complete by then
    no request ── idle_s ──▶ closed: aiohttp's own timer

aiohttp receives one request at a time. Pipelined data, which arrives before the previous response has ended, is kept
unread. So the time limit of a pipelined head starts when the previous response has ended. This module limits only the
wait for a head; a body has its own deadline.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http import RawRequestMessage

from controller.frontend.errors import ApiError
from controller.frontend.http.responses import encoded_response, refusal
from controller.frontend.metrics import BoundMetrics
from controller.frontend.settings import ConnectionSettings

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
MIB = 2**20
RETRY_AFTER_S = 1  # seconds until the client of a refused connection should retry
AHEAD_BYTES_MAX = 2**18  # unread pipelined data above which reading pauses
_END = b"\r\n\r\n"  # end of a head
LINE_MAX = 64  # inspected bytes of a chunk-size line or a trailer
_ENDLESS = 2**63
_size = re.compile(rb"[ \t]*([0-9a-fA-F]{1,15})[ \t]*(?:;|$)").match


class OpenConnections:
    """Limits the number of connections to one port, in total and per client address.

    A connection is counted until it is lost, even after the fast path hands it over to aiohttp. A refused connection
    gets an HTTP error at once.
    """

    def __init__(self, settings: ConnectionSettings, bounds: BoundMetrics) -> None:
        """Start without connections. `bounds` counts each connection that is refused or closed at a limit."""
        self.settings = settings
        self._bounds = bounds
        self._by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._by_address.total()

    def enter(self, transport: asyncio.Transport) -> bool:
        """Count a new connection and return True. At a limit, send an error, close the connection and return False."""
        address, settings = address_of(transport), self.settings
        if settings.per_address_max and self._by_address[address] >= settings.per_address_max:
            bound = "connections_of_address"
            why = f"this address already has {settings.per_address_max} connections"
        elif settings.total_max and len(self) >= settings.total_max:
            bound, why = "connections", f"this frontend already has {settings.total_max} connections"
        else:
            self._by_address[address] += 1
            return True
        error = ApiError(503, why, code="too_many_connections", retry_after_s=RETRY_AFTER_S)
        self.end(transport, bound, error)
        return False

    def leave(self, transport: asyncio.Transport) -> None:
        """Remove a connection from the counts."""
        address = address_of(transport)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def end(self, transport: asyncio.Transport, bound: str, error: ApiError) -> None:
        """Send an error to a connection that exceeds a limit and has no request yet, then close the connection.

        `bound` is the name under which the exceeded limit is counted.
        """
        self._bounds.count(bound)
        transport.write(encoded_response(refusal(error, {"Connection": "close"})))
        transport.close()


def address_of(transport: asyncio.Transport) -> str:
    """Return a client's address without the port."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if peer else ""


class BodyEnd:
    """Finds the end of one request's body in received bytes. Bytes after the end belong to the next request.

    aiohttp's parser reads the same bytes and validates them. If the parser will reject a body, no end is found.
    """

    __slots__ = ("_chunked", "_left", "_line", "_trailers", "whole")

    def __init__(self, length: int, chunked: bool) -> None:
        """Start before a body of `length` bytes. If `chunked` is true, the body itself contains the sizes of its chunks."""
        self.whole = not length and not chunked
        self._chunked = chunked
        self._left = 0 if chunked else length  # bytes left in the current chunk, including its line end
        self._line = b""  # start of an incomplete line
        self._trailers = False  # the last chunk has been seen

    def take(self, data: bytes) -> int:
        """Return how many of the next received bytes belong to the body."""
        at = 0
        while at < len(data) and not self.whole:
            if self._left:
                step = min(self._left, len(data) - at)
                at += step
                self._left -= step
                self.whole = not self._left and not self._chunked
            else:
                at = self._take_line(data, at)
        return at

    def _take_line(self, data: bytes, at: int) -> int:
        end = data.find(b"\n", at) + 1
        self._line = (self._line + data[at : min(end or len(data), at + LINE_MAX)])[:LINE_MAX]
        if not end:
            return len(data)
        line, self._line = self._line.rstrip(b"\r\n"), b""
        if self._trailers:
            self.whole = not line
        elif (found := _size(line)) is None:
            self._left = _ENDLESS
        elif size := int(found[1], 16):
            self._left = size + len(b"\r\n")
        else:
            self._trailers = True
        return end


NO_BODY = BodyEnd(0, False)


class ClientHandler(web.RequestHandler):
    """One client connection served by aiohttp, with limits on the size and arrival time of each request head."""

    __slots__ = (
        "_admitted", "_ahead", "_body", "_clients", "_head_bytes", "_head_tail", "_head_timer", "_payload", "_unanswered",
    )  # fmt: skip

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, clients: OpenConnections) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=cast(logging.Logger, None),  # disables the access log
            keepalive_timeout=clients.settings.idle_s,
            max_line_size=clients.settings.head_bytes_max,
            max_field_size=clients.settings.head_bytes_max,
            auto_decompress=False,  # `Intake` decompresses, within its limits
        )
        self._clients = clients
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # received bytes of the current head
        self._head_tail = b""  # last bytes of the current head
        self._body = NO_BODY  # the rest of the last request's body
        self._payload: StreamReader | None = None  # that body as the handler reads it
        self._unanswered = 0  # requests without a response yet, including invalid ones
        self._ahead = bytearray()
        self._admitted: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register a new connection, or a connection that the fast path hands over."""
        client = cast(asyncio.Transport, transport)
        if self._clients.enter(client):
            self._admitted = client
            super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Process received bytes, and enforce the limits of a request head.

        The first byte of a head starts the head's timer.
        """
        if self._admitted is None or self._close or self._force_close:
            return
        if not data:  # aiohttp calls this without data when its parser has kept a part of a body
            self._offer(data)
            self._read_ahead()
        elif self._ahead:
            self._keep(data)
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        """Pass the bytes of one request to aiohttp, and keep later bytes until that request is answered."""
        while data:
            if not self._body.whole:
                end = self._body.take(data)
                self._offer(data[:end])
            elif self._is_busy:
                self._keep(data)
                return
            else:
                if not self._head_tail:
                    data = data.lstrip(b"\r\n")  # allowed between requests
                end = self._read_head(data)
            data = data[end:]

    def _read_head(self, data: bytes) -> int:
        """Pass the next head, or a part of a head, to aiohttp. Return the number of bytes passed."""
        seen = self._head_tail + data
        found = seen.find(_END)
        end = len(data) if found < 0 else found + len(_END) - len(self._head_tail)
        self._head_tail = seen[: len(self._head_tail) + end][1 - len(_END) :]
        self._head_bytes += end
        most = self._clients.settings.head_bytes_max
        if self._head_bytes > most:
            why = f"the request's line and headers have more than {most} bytes"
            self._refuse("head_bytes", ApiError(431, why, code="headers_too_large"))
            return len(data)
        self._offer(data[:end])
        if self._head_tail and self._head_timer is None:
            self._head_timer = self._loop.call_later(self._clients.settings.head_s, self._head_is_late)
        return end

    def _offer(self, data: bytes) -> None:
        """Pass bytes to aiohttp's parser. If the bytes complete a head, expect the body of that request next."""
        known = self._request_count
        super().data_received(data)
        if self._request_count != known:
            self._unanswered += self._request_count - known
            self._head_tail = b""
            self._head_bytes = 0
            self._stop_head_timer()
            before = self._payload
            message, self._payload = self._messages[-1]
            self._body = _body_of(message)
            # aiohttp's parser has silently dropped the previous body
            if before is not None and not before.is_eof():
                before.set_exception(web.RequestPayloadError("the body does not match its headers"))
                before.feed_eof()

    @property
    def _is_busy(self) -> bool:
        """Whether a request has no response yet, or aiohttp's parser still holds a part of its body."""
        return bool(self._unanswered) or not (self._payload is None or self._payload.is_eof())

    def _read_ahead(self) -> None:
        """Process the pipelined bytes that were kept, if the previous request is complete and answered."""
        if self._ahead and not self._is_busy:
            data, self._ahead = bytes(self._ahead), bytearray()
            self.data_received(data)
            if self._buffer_paused:
                self._resume_reading_for_buffer()

    def _keep(self, data: bytes) -> None:
        self._ahead += data
        if len(self._ahead) > AHEAD_BYTES_MAX:
            self._pause_reading_for_buffer()

    def _resume_reading_for_buffer(self) -> None:
        """Resume reading, unless too much pipelined data is kept. Called by aiohttp when it starts to handle a request."""
        if len(self._ahead) <= AHEAD_BYTES_MAX:
            super()._resume_reading_for_buffer()

    async def _handle_request(self, *given: Any) -> tuple[web.StreamResponse, bool]:
        """Handle a request, then process the pipelined bytes that were kept meanwhile."""
        try:
            return await super()._handle_request(*given)
        finally:
            self._unanswered -= 1
            self._read_ahead()

    def _head_is_late(self) -> None:
        self._head_timer = None
        why = f"the request's headers did not arrive within {self._clients.settings.head_s:g} s"
        self._refuse("head_wait", ApiError(408, why, code="head_timeout"))

    def _refuse(self, bound: str, error: ApiError) -> None:
        """Send an error for an exceeded limit and close the connection, unless it is closing already.

        `bound` is the name under which the exceeded limit is counted.
        """
        if self._admitted is not None and not self._admitted.is_closing():
            self._clients.end(self._admitted, bound, error)
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to an invalid HTTP request, and close the connection after it.

        aiohttp's own response would quote the invalid line, which may contain an API key. Only internal errors get
        aiohttp's own response.
        """
        response_of_aiohttp = super().handle_error(request, status, exc)  # aiohttp's method logs the error
        if status >= 500:
            return response_of_aiohttp
        name = f" ({type(exc).__name__})" if exc is not None else ""
        error = ApiError(status, f"this is not a valid HTTP request{name}", code="invalid_http")
        response = refusal(error, {})
        response.force_close()
        return response

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """Deregister the connection."""
        self._stop_head_timer()
        if self._admitted is not None:
            self._clients.leave(self._admitted)
            self._admitted = None
            super().connection_lost(exc)


def _body_of(message: object) -> BodyEnd:
    """Return the `BodyEnd` of the body that follows a head.

    aiohttp's parser has already validated the lengths in the head.
    """
    if not isinstance(message, RawRequestMessage):  # not a valid request
        return NO_BODY
    return BodyEnd(int(message.headers.get("Content-Length", 0)), message.chunked)


class ClientServer(web.Server):
    """Creates a handler for each client connection of one port."""

    def __init__(self, handler: Handler, clients: OpenConnections, body_mb_max: int) -> None:
        """Handle requests with `handler`. The handling of a request is cancelled as soon as its client disconnects."""
        loop = asyncio.get_running_loop()
        make = partial(web.BaseRequest, loop=loop, client_max_size=body_mb_max * MIB)
        super().__init__(handler, request_factory=make, handler_cancellation=True)
        self._clients = clients

    def __call__(self) -> ClientHandler:
        return ClientHandler(self, asyncio.get_running_loop(), self._clients)
