"""Incremental parser of one HTTP/1.1 response.

    head ──▶ body: events, or bytes ──▶ over
      └────────────┴─ MalformedResponse

The parser has no socket. Its caller passes the received bytes to `feed`, and the callback `take` receives the events. All events
in the data of one call get the same time.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

Now = Callable[[], float]
"""A clock, in seconds."""
Take = Callable[[bytes, float], None]
"""Called with each event of an answer, without its `data: `, and the time of its arrival."""
# a body of any other type may be an event stream, because not all servers declare the type
_JSON = re.compile(rb"\ncontent-type:\s*application/json")
_LENGTH = re.compile(rb"\ncontent-length:\s*(\d+)")
_CHUNKED = re.compile(rb"\ntransfer-encoding:[^\r\n]*\bchunked\b")
_CLOSES = re.compile(rb"\nconnection:[^\r\n]*\bclose\b")
_STATUS = re.compile(rb"http/1\.[01] (\d{3})\b")


class MalformedResponse(Exception):
    """The response is not HTTP/1.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseLimits:
    """Size limits of the parts of a response, in bytes."""

    head: int = 64 << 10
    body: int = 16 << 20  # body of a response that is not an event stream
    event: int = 1 << 20
    size_line: int = 1024  # line with a chunk's length


class HttpResponse:
    """Parses one response. `status` and `head` are set once the head is complete. `body` stays empty if events are streamed."""

    def __init__(self, take: Take | None, now: Now, limits: ResponseLimits) -> None:
        self._take, self._now, self._limits = take, now, limits
        self._buffer, self._line = b"", b""
        self._need = self._skip = 0  # bytes still to come of a chunk, and of the line end after the chunk
        self._left: int | None = None  # bytes still to come of the body; None: its length is unknown
        self._headed = self._chunked = self._events = False
        self._over = False
        self.closes = False  # whether the server closes the connection after the response
        self.status, self.head, self.body = 0, b"", b""

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the end of the connection completes the response."""
        return self._headed and not self._chunked and self._left is None

    def feed(self, data: bytes) -> bool:
        """Process the next received bytes, and return whether the response is complete.

        Raise MalformedResponse or ValueError if they are not HTTP/1.1, or exceed a limit.
        """
        if not self._headed:
            data = self._take_head(data)
        if self._headed and self._chunked:
            self._dechunk(data)
        elif self._headed:
            self._counted(data)
        return self._over

    def _take_head(self, data: bytes) -> bytes:
        """Process the bytes of the head, and return the bytes after it; b"" while the head is incomplete."""
        self._buffer += data
        while not self._headed:
            at = self._buffer.find(b"\r\n\r\n")
            if at < 0:
                if len(self._buffer) > self._limits.head:
                    raise MalformedResponse
                return b""
            self.head, self._buffer = self._buffer[:at], self._buffer[at + 4 :]
            self._parse_head(self.head.lower())
        rest, self._buffer = self._buffer, b""
        return rest

    def _parse_head(self, head: bytes) -> None:
        """Parse the head of the response, or of an informational response (1xx) before it."""
        found = _STATUS.match(head)
        if found is None:
            raise MalformedResponse
        status = int(found[1])
        if status < 200:
            return
        self._headed, self.status = True, status
        self._chunked = _CHUNKED.search(head) is not None
        self._events = status == 200 and self._take is not None and not _JSON.search(head)
        self.closes = _CLOSES.search(head) is not None or head.startswith(b"http/1.0")
        length = _LENGTH.search(head)
        self._left = int(length.group(1)) if length else None

    def _counted(self, data: bytes) -> None:
        """Process bytes of a body that ends after a known number of bytes or with the connection."""
        if data:
            self._consume(data)
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._over = True

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
                    raise MalformedResponse
                self._skip, at = self._skip - step, at + step
            else:
                line = whole.find(b"\r\n", at)
                if line < 0:
                    if size - at > self._limits.size_line:
                        raise MalformedResponse
                    break
                need = int(whole[at:line].split(b";")[0], 16)
                if need < 0:
                    raise MalformedResponse
                if not need:  # trailers, if any, end like a head
                    over = whole.find(b"\r\n\r\n", line) >= 0
                    if not over and size - at > self._limits.head:
                        raise MalformedResponse
                    break
                self._need, at = need, line + 2
        self._buffer = whole[at:]
        if out:
            self._consume(out[0] if len(out) == 1 else b"".join(out))
        self._over = over

    def _consume(self, data: bytes) -> None:
        if not self._events:
            self.body += data
            if len(self.body) > self._limits.body:
                raise MalformedResponse
            return
        lines = (self._line + data if self._line else data).split(b"\n")
        self._line = lines.pop()
        if len(self._line) > self._limits.event:
            raise MalformedResponse
        assert self._take is not None
        at = self._now()
        for line in lines:
            if line[:5] == b"data:":
                self._take(line[5:].strip(), at)
