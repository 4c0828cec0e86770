"""One HTTP response as a stream of server-sent events, written directly to the transport.

All output of one event-loop iteration is written at once, with one event for each token.

The response head is sent with the first event, so that a failure before the first token is a proper HTTP error. After
`early_head_s` without a token, the head is sent anyway, even while the request is queued or tokenized. Later errors
are events of the stream.

No stream waits for its client. Data that the client does not read is buffered up to a limit and a deadline. If either
is exceeded, the client is disconnected.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from prometheus_client import Counter

from controller.frontend.openai.choice import Choice
from controller.frontend.openai.request_head import Call, Head, worker_headers
from controller.frontend.settings import StreamSettings

DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
KEEP_ALIVE = b": waiting for a worker\n\n"
INEXACT = b": holdfast exact=false, this answer may differ from that of a single healthy worker\n\n"
NO_TOKEN_YET = b": waiting for the first token\n\n"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False, repr=False)
class SseStream:
    """Writes the streamed response to one request on its connection, within the limits of the settings."""

    _call: Call
    transport: asyncio.Transport
    _limits: StreamSettings
    _cut_off: Counter  # counts clients disconnected because they do not read
    # the response head names the workers on which the answers run when the head is sent
    answers: Sequence[Choice] = ()
    parts: list[bytes] = field(default_factory=list)
    status: int = 200
    media: str = EVENT_STREAM
    started: bool = False
    ended: bool = False
    _written: int = 0
    _seen: int = 0  # bytes that had left our buffer at the last check
    _moved_at: float | None = None  # time of the last progress; None while no data waits
    # time of the request's arrival, or of the last comment before the first token
    _quiet_at: float = field(init=False)
    # bytes written by that time; while this equals `_written`, no token has been written
    _quiet_bytes: int = 0

    def __post_init__(self) -> None:
        self._quiet_at = self._call.arrived

    def end(self, last: bytes) -> None:
        """Write the collected parts followed by `last`, and end the response."""
        self.parts.append(last)
        self.ended = True
        self.flush()

    def flush(self) -> None:
        """Write the collected parts as one chunk, with one system call per event-loop iteration."""
        parts = self.parts
        if not parts:
            return
        if self._call.head.chunked:
            if size := sum(map(len, parts)):
                parts.insert(0, b"%x\r\n" % size)
                parts.append(b"\r\n0\r\n\r\n" if self.ended else b"\r\n")
            elif self.ended:  # an empty chunk ends the response
                parts.append(b"0\r\n\r\n")
        if not self.started:
            self.started = True
            headers = self._call.headers | worker_headers(self.answers)
            parts.insert(0, response_head(self._call.head, headers, self.status, self.media))
        payload = b"".join(parts)  # joined only once, because answers can be large
        parts.clear()
        transport = self.transport
        if transport.is_closing():
            return
        transport.write(payload)
        self._written += len(payload)
        if transport.get_write_buffer_size() > self._limits.buffer_bytes_max:
            self._cut("the client does not read its response")

    def keep_alive(self, comment: bytes = KEEP_ALIVE) -> None:
        """Send an SSE comment, which clients ignore. Without it, the connection would look idle while no token arrives.

        Streams of the Messages API have an event for this purpose.
        """
        self.parts.append(PING if self._call.parsed.api == "messages" else comment)
        self.flush()

    def await_token(self, now: float) -> None:
        """Send the head and a comment after `early_head_s` without a token, so that no proxy closes the connection.

        `now` is in monotonic seconds. The comment is repeated after each further `early_head_s` without a token.
        """
        every_s = self._limits.early_head_s
        if not every_s or self._written != self._quiet_bytes or now - self._quiet_at < every_s:
            return
        self.keep_alive(NO_TOKEN_YET)
        self._quiet_at, self._quiet_bytes = now, self._written

    def check(self, now: float) -> None:
        """Disconnect the client if data has waited for `write_deadline_s` without progress.

        `now` is in monotonic seconds.
        """
        waiting = self.waiting
        left = self._written - waiting
        if not waiting:
            self._moved_at = None
        elif self._moved_at is None or left > self._seen:
            self._moved_at = now
        elif now - self._moved_at > self._limits.write_deadline_s:
            self._cut(f"the client has read nothing for {self._limits.write_deadline_s:g} s")
        self._seen = left

    def _cut(self, why: str) -> None:
        """Disconnect a client that does not read. The client's request is cancelled if it still runs."""
        if self.answers:
            log.warning("client_cut_off", request=self._call.id, why=why)
        self._cut_off.inc()
        self.abort()

    @property
    def waiting(self) -> int:
        """Number of bytes that the client has not read yet."""
        return 0 if self.transport.is_closing() else self.transport.get_write_buffer_size()

    def release(self) -> None:
        """Drop the references to the answers, so that a finished request is freed without the garbage collector."""
        self.answers = ()

    def abort(self) -> None:
        """Close the client's connection at once, and discard unsent data."""
        self.transport.abort()


class StreamedResponse(web.StreamResponse):
    """Represents for aiohttp a response that an SseStream has already written."""

    def __init__(self, *, keep: bool) -> None:
        super().__init__()
        self._keep_alive = keep

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        self._eof_sent = True


def response_head(
    head: Head, headers: Mapping[str, str], status: int = 200, media: str = EVENT_STREAM
) -> bytes:
    """Return the head of a response that is sent in pieces, for a request with this head."""
    second = int(time.time())  # noqa: TID251 (shown to the client, compared with nothing)
    lines = [head_beginning(head.version, second, status, media)]
    lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
    if head.chunked:
        lines.append("Transfer-Encoding: chunked\r\n")
    lines.append("\r\n" if head.keep else "Connection: close\r\n\r\n")
    return "".join(lines).encode("latin-1", "replace")


@lru_cache(4)  # HTTP versions and kinds of responses; formats the date only once per second
def head_beginning(version: tuple[int, int], second: int, status: int, media: str) -> str:
    """Return the first lines of a response head: the status line, constant headers and the date.

    `second` is the number of seconds since 1970, UTC.
    """
    return (
        f"HTTP/{version[0]}.{version[1]} {status} {HTTPStatus(status).phrase}\r\n"
        f"Content-Type: {media}\r\n"
        "Cache-Control: no-cache\r\n"
        "X-Accel-Buffering: no\r\n"
        f"Date: {formatdate(second, usegmt=True)}\r\n"
    )
