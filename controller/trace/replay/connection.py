"""An HTTP/1.1 client connection that handles one request at a time.

    idle ── send ──▶ head ──▶ body: events, or bytes ──▶ idle, with `how` = "whole"
                       └─────────────┴─ broke, malformed: closed

The connection is an asyncio protocol, not an asyncio stream. Data that arrives together causes one wake-up. All events in the
data get the time at which the data arrived, not the time at which a task runs. (An event takes 14 to 16 us of a core, and 18 to
25 us with aiohttp's client, measured with 200 streams on a busy machine.)
"""

import asyncio
import time
from collections.abc import Callable
from typing import Literal, cast

from controller.trace.replay.response import HttpResponse, MalformedResponse, Now, ResponseLimits, Take

now = time.perf_counter  # the clock of all measurements; tests replace it
How = Literal["", "whole", "broke", "malformed"]


class ClientConnection(asyncio.Protocol):
    """One connection. After an answer, `response` is the answer, and `how` and `ended` state how and when it ended."""

    def __init__(
        self,
        on_read: Callable[[], None] = lambda: None,
        now: Now = now,
        limits: ResponseLimits = ResponseLimits(),  # noqa: B008 (frozen)
    ) -> None:
        self._on_read = on_read
        self._now = now
        self._limits = limits
        self.transport: asyncio.Transport | None = None
        self.closed = True
        self.discarding = False  # whether arriving data is discarded, because the connection will be closed
        self.idle_since = 0.0
        self._over: asyncio.Future[None] | None = None
        self._begin(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport. Called by asyncio when the connection is open."""
        self.transport, self.closed = cast(asyncio.Transport, transport), False

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer in progress: "whole" if its body ends with the connection, otherwise "broke". Called by asyncio."""
        self.closed = True
        self._end("whole" if self.response.ends_with_connection and exc is None else "broke")

    def send(self, data: bytes, take: Take | None = None) -> "asyncio.Future[None]":
        """Send a request, and return a future that is done when the answer has ended, successfully or not.

        `take` receives the answer's events as they arrive.
        """
        assert self.transport is not None and self._over is None
        self._begin(take)
        over = self._over = asyncio.get_running_loop().create_future()
        if self.closed:
            self._end("broke")
        else:
            self.transport.write(data)
        return over

    def pause(self) -> None:
        """Stop reading from the socket until `resume`."""
        if self.transport is not None and not (self.closed or self.transport.is_closing()):
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read from the socket again, unless the connection is closed or discards its data."""
        if self.transport is not None and not (self.closed or self.discarding or self.transport.is_closing()):
            self.transport.resume_reading()

    def close(self) -> None:
        """Close the connection at once, and discard the rest of an answer."""
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    def _begin(self, take: Take | None) -> None:
        self.response = HttpResponse(take, self._now, self._limits)
        self.received = False  # whether at least one byte of the answer has arrived
        self.how: How = ""
        self.ended = 0.0

    def _end(self, how: How) -> None:
        over, self._over = self._over, None
        if over is not None and not over.done():
            self.how, self.ended = how, self._now()
            self.idle_since = self.ended
            if how != "whole" or self.response.closes:
                self.close()
            over.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Process data that has arrived. All events in it get the same time. Called by asyncio."""
        if self._over is None:
            self.close()  # the server sent data without a request
            return
        if self.discarding:
            assert self.transport is not None
            self.transport.pause_reading()
            return
        self.received = True
        try:
            if self.response.feed(data):
                self._end("whole")
        except (MalformedResponse, ValueError):
            self._end("malformed")
        self._on_read()
