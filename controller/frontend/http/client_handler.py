"""Connections that aiohttp serves, with two bounds of our own: how many there are, and how long a head may take.

    first byte of a head ── head_s ──▶ 408, unless the head is whole by then
    no request ── idle_s ──▶ closed: aiohttp's own timer

aiohttp gets one request at a time. What arrives ahead of its turn is kept unread, so the time of a head in it begins when the
answer before it has ended. Only the wait for a head is timed here; a body has its own deadline.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http import RawRequestMessage

from controller.frontend.errors import ApiError
from controller.frontend.http.answers import refusal
from controller.frontend.http.open_connections import OpenConnections

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
MIB = 2**20
AHEAD_BYTES_MAX = 2**18  # of what is sent ahead of its turn: past it reading pauses
_END = b"\r\n\r\n"  # of a head
LINE_MAX = 64  # bytes of a chunk's size or of a trailer that are looked at
_ENDLESS = 2**63
_size = re.compile(rb"[ \t]*([0-9a-fA-F]{1,15})[ \t]*(?:;|$)").match


class BodyEnd:
    """Finds the end of one request's body in the bytes that arrive. What lies behind it belongs to the next request.

    aiohttp's parser reads the same bytes and validates them: a body that it will refuse has no end here.
    """

    __slots__ = ("_chunked", "_left", "_line", "_trailers", "whole")

    def __init__(self, length: int, chunked: bool) -> None:
        """Begin with a body of so many bytes, or, if it is `chunked`, with one whose own lines say how many."""
        self.whole = not length and not chunked
        self._chunked = chunked
        self._left = 0 if chunked else length  # of this chunk, and of the line's end behind it
        self._line = b""  # the beginning of a line that has not ended
        self._trailers = False  # the last chunk has been seen

    def take(self, data: bytes) -> int:
        """Return how many of these bytes, which come next, belong to it."""
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


class ClientHandler(web.RequestHandler):
    """One connection."""

    __slots__ = (
        "_ahead", "_body", "_clients", "_head_bytes", "_head_tail", "_head_timer", "_let_in", "_payload", "_unanswered",
    )  # fmt: skip

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, clients: OpenConnections) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=cast(Any, None),  # it is told of nothing
            keepalive_timeout=clients.settings.idle_s,
            max_line_size=clients.settings.head_bytes_max,
            max_field_size=clients.settings.head_bytes_max,
            auto_decompress=False,  # `Intake` inflates, no further than it must
        )
        self._clients = clients
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # of that head so far
        self._head_tail = b""  # the last bytes of the head that has begun
        self._body: BodyEnd | None = None  # what is still to come of the last request
        self._payload: StreamReader | None = None  # that body, as the answer reads it
        self._unanswered = 0  # requests, mistaken ones too
        self._ahead = bytearray()
        self._let_in: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come, or is handed over."""
        client = cast(asyncio.Transport, transport)
        if self._clients.enter(client):
            self._let_in = client
            super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the first of a head start its time."""
        if self._let_in is None or self._close or self._force_close:
            return
        if not data:  # aiohttp's parser has kept some of a body
            self._offer(data)
            self._read_ahead()
        elif self._ahead:
            self._keep(data)
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        """Give aiohttp what belongs to one request, and keep the rest until that is answered."""
        while data:
            if self._body is not None:
                end = self._body.take(data)
                if self._body.whole:
                    self._body = None
                self._offer(data[:end])
            elif self._is_busy:
                self._keep(data)
                return
            else:
                if not self._head_tail:
                    data = data.lstrip(b"\r\n")  # which may stand between requests
                end = self._read_head(data)
            data = data[end:]

    def _read_head(self, data: bytes) -> int:
        """Read the next head, or a part of it. Return how many bytes that are."""
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
        """Give bytes to aiohttp's parser, and see whether they were the last of a head."""
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
            if before is not None and not before.is_eof():  # aiohttp's parser has dropped its body silently
                before.set_exception(web.RequestPayloadError("the body is not what its head says"))
                before.feed_eof()

    @property
    def _is_busy(self) -> bool:
        """Whether a request is being answered, or a part of its body still lies in aiohttp's parser."""
        return bool(self._unanswered) or not (self._payload is None or self._payload.is_eof())

    def _read_ahead(self) -> None:
        """Read on in what was kept, if its turn has come."""
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
        """Read again, unless there is too much that waits for its turn: aiohttp asks when it begins with a request."""
        if len(self._ahead) <= AHEAD_BYTES_MAX:
            super()._resume_reading_for_buffer()

    async def _handle_request(self, *given: Any) -> tuple[web.StreamResponse, bool]:
        """Answer a request; then it is the next one's turn."""
        try:
            return await super()._handle_request(*given)
        finally:
            self._unanswered -= 1
            self._read_ahead()

    def _head_is_late(self) -> None:
        self._head_timer = None
        why = f"the request's head has not come within {self._clients.settings.head_s:g} s"
        self._refuse("head_wait", ApiError(408, why, code="head_timeout"))

    def _refuse(self, bound: str, error: ApiError) -> None:
        """End the connection at a bound, unless it is closing."""
        if self._let_in is not None and not self._let_in.is_closing():
            self._clients.end(self._let_in, bound, error)
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no request, and close. aiohttp would quote the line that it did not understand, which may hold a key."""
        usual = super().handle_error(request, status, exc)  # which logs it
        if status >= 500:
            return usual
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
        """The client has gone."""
        self._stop_head_timer()
        if self._let_in is not None:
            self._clients.leave(self._let_in)
            self._let_in = None
            super().connection_lost(exc)


def _body_of(message: object) -> BodyEnd | None:
    """Return what is to come behind a head; None: nothing. aiohttp's parser has seen to its lengths."""
    if not isinstance(message, RawRequestMessage):  # it was none
        return None
    body = BodyEnd(int(message.headers.get("Content-Length", 0)), message.chunked)
    return None if body.whole else body


class ClientServer(web.Server):
    """What makes them, for one port."""

    def __init__(self, handler: Handler, clients: OpenConnections, body_mb_max: int) -> None:
        """Answer with `handler`; a client that goes away is noticed in the same turn of the loop."""
        loop = asyncio.get_running_loop()
        make = partial(web.BaseRequest, loop=loop, client_max_size=body_mb_max * MIB)
        super().__init__(handler, request_factory=make, handler_cancellation=True)
        self._clients = clients

    def __call__(self) -> ClientHandler:
        return ClientHandler(self, asyncio.get_running_loop(), self._clients)
