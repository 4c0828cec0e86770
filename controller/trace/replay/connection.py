"""One HTTP/1.1 connection of a client, with one request on it at a time.

    idle ── send ──▶ head ──▶ body: events, or bytes ──▶ idle, with `how` = "whole"
                       └─────────────┴─ broke, malformed: closed

It is a protocol, not a stream of lines: data that comes together costs one wake-up, and all its events have one moment, the
one at which they came and not the one at which a task got to them. (An event takes 14 to 16 us of a core, by aiohttp's client
18 to 25: 200 streams on a busy machine.)
"""

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any, Literal

HEAD_MAX = 64 << 10  # bytes
BODY_MAX = 16 << 20  # of what is no stream of events
EVENT_MAX = 1 << 20
SIZE_LINE_MAX = 1024  # of a chunk

now = time.perf_counter
Now = Callable[[], float]
"""A clock, in seconds: `now`, but in a test that owns the time."""
Take = Callable[[bytes, float], None]
"""Called with each event of an answer, without its `data: `, and the moment at which it came."""
How = Literal["", "whole", "broke", "malformed"]
_JSON = re.compile(
    rb"\ncontent-type:\s*application/json"
)  # anything else may be events: not all servers say so
_LENGTH = re.compile(rb"\ncontent-length:\s*(\d+)")
_CHUNKED = re.compile(rb"\ntransfer-encoding:[^\r\n]*\bchunked\b")
_CLOSES = re.compile(rb"\nconnection:[^\r\n]*\bclose\b")
_STATUS = re.compile(rb"http/1\.[01] (\d{3})\b")


class Malformed(Exception):
    """What came is no HTTP/1.1."""


class Connection(asyncio.Protocol):
    """One connection. After an answer: `status`, `head`, `body` (of what is no stream of events), `how` it ended."""

    def __init__(self, on_read: Callable[[], None] | None = None, now: Now = now) -> None:
        self._on_read = on_read or _nobody
        self._now = now
        self.transport: asyncio.Transport | None = None
        self.closed = True
        self.deaf = False  # what still comes is not wanted: it will be closed soon
        self.idle_since = 0.0
        self._over: asyncio.Future[None] | None = None
        self._begin(None)

    def connection_made(self, transport: Any) -> None:
        self.transport, self.closed = transport, False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        until_closed = self._headed and not self._chunked and self._left is None
        self._end("whole" if until_closed and exc is None else "broke")

    def send(self, data: bytes, take: Take | None = None) -> "asyncio.Future[None]":
        """Send a request. The future is done when its answer has ended, however it did."""
        assert self.transport is not None and self._over is None
        self._begin(take)
        self._over = asyncio.get_running_loop().create_future()
        if self.closed:
            self._end("broke")
        else:
            self.transport.write(data)
        return self._over or _done()

    def pause(self) -> None:
        """Read no more for now."""
        if self.transport is not None and not (self.closed or self.transport.is_closing()):
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self.transport is not None and not (self.closed or self.deaf or self.transport.is_closing()):
            self.transport.resume_reading()

    def close(self) -> None:
        """Close it at once: what is still to come of an answer is not wanted."""
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    def _begin(self, take: Take | None) -> None:
        self._take = take
        self._buffer, self._line = b"", b""
        self._need = self._skip = 0  # bytes of a chunk, and of the line end behind it
        self._left: int | None = None  # bytes of a body of known length
        self.heard = False  # anything at all
        self._headed = self._chunked = self._events = self._closes = False
        self.status, self.head, self.body = 0, b"", b""
        self.how: How = ""
        self.ended = 0.0

    def _end(self, how: How) -> None:
        over, self._over = self._over, None
        if over is not None and not over.done():
            self.how, self.ended = how, self._now()
            self.idle_since = self.ended
            if how != "whole" or self._closes:
                self.close()
            over.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._over is None:
            self.close()  # nobody asked
            return
        if self.deaf:
            assert self.transport is not None
            self.transport.pause_reading()
            return
        self.heard = True
        try:
            if not self._headed:
                data = self._head(data)
            if self._headed and self._chunked:
                self._dechunk(data)
            elif self._headed:
                self._counted(data)
        except (Malformed, ValueError):
            self._end("malformed")
        self._on_read()

    def _head(self, data: bytes) -> bytes:
        """Take in what belongs to the head, and return the rest."""
        self._buffer += data
        while not self._headed:
            at = self._buffer.find(b"\r\n\r\n")
            if at < 0:
                if len(self._buffer) > HEAD_MAX:
                    raise Malformed
                return b""
            self.head, self._buffer = self._buffer[:at], self._buffer[at + 4 :]
            self._understand(self.head.lower())
        rest, self._buffer = self._buffer, b""
        return rest

    def _understand(self, head: bytes) -> None:
        """Take in a head: of the answer, or of an announcement that goes before it."""
        found = _STATUS.match(head)
        if found is None:
            raise Malformed
        status = int(found[1])
        if status < 200:
            return
        self._headed, self.status = True, status
        self._chunked = _CHUNKED.search(head) is not None
        self._events = status == 200 and self._take is not None and not _JSON.search(head)
        self._closes = _CLOSES.search(head) is not None or head.startswith(b"http/1.0")
        length = _LENGTH.search(head)
        self._left = int(length.group(1)) if length else None

    def _counted(self, data: bytes) -> None:
        """Take in a body that ends after so many bytes, or with the connection."""
        if data:
            self._eat(data)
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._end("whole")

    def _dechunk(self, data: bytes) -> None:
        whole, at, out = self._buffer + data if self._buffer else data, 0, []
        size, over = len(whole), False
        while at < size:
            if self._need:
                step = min(self._need, size - at)
                out.append(whole[at : at + step])
                at, self._need = at + step, self._need - step
                self._skip = 0 if self._need else 2
            elif self._skip:
                step = min(self._skip, size - at)
                if not b"\r\n"[-self._skip :].startswith(whole[at : at + step]):
                    raise Malformed
                self._skip, at = self._skip - step, at + step
            else:
                line = whole.find(b"\r\n", at)
                if line < 0:
                    if size - at > SIZE_LINE_MAX:
                        raise Malformed
                    break
                need = int(whole[at:line].split(b";")[0], 16)
                if need < 0:
                    raise Malformed
                if not need:  # trailers, if there are any, end as a head does
                    over = whole.find(b"\r\n\r\n", line) >= 0
                    if not over and size - at > HEAD_MAX:
                        raise Malformed
                    break
                self._need, at = need, line + 2
        self._buffer = whole[at:]
        if out:
            self._eat(out[0] if len(out) == 1 else b"".join(out))
        if over:
            self._end("whole")

    def _eat(self, data: bytes) -> None:
        if not self._events:
            self.body += data
            if len(self.body) > BODY_MAX:
                raise Malformed
            return
        lines = (self._line + data if self._line else data).split(b"\n")
        self._line = lines.pop()
        if len(self._line) > EVENT_MAX:
            raise Malformed
        assert self._take is not None
        at = self._now()
        for line in lines:
            if line[:5] == b"data:":
                self._take(line[5:].strip(), at)


def _nobody() -> None:
    """Nobody wants to know."""


def _done() -> "asyncio.Future[None]":
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done
