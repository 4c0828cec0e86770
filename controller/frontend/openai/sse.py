"""One HTTP response as a stream of server-sent events, written directly to the transport.

All output of one event-loop iteration is written at once, with one event for each token.

The response head is sent with the first event, so that a failure before the first token is a proper HTTP error. After
`early_head_s` without a token, the head is sent anyway, even while the request is queued or tokenized. Later errors
are events of the stream.

No stream waits for its client. Data that the client does not read is buffered up to a limit and a deadline. If either
is exceeded, the client is disconnected.
"""

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache

import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from prometheus_client import Counter

from controller.frontend.openai.choice import Choice
from controller.frontend.openai.request_head import Call, Head, worker_headers
from controller.frontend.settings import StreamSettings

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting for a worker\n\n"
NO_TOKEN_YET = b": waiting for the first token\n\n"

log = structlog.get_logger(__name__)


class SseStream:
    """Writes the streamed response to one request."""

    __slots__ = (
        "_call", "_cut_off", "_limits", "_moved_at", "_quiet_at", "_quiet_bytes", "_seen", "_transport", "_written",
        "answers", "ended", "parts", "started",
    )  # fmt: skip

    def __init__(
        self, call: Call, transport: asyncio.Transport, limits: StreamSettings, cut_off: Counter
    ) -> None:
        """Respond to a request on its connection, within `limits`.

        `cut_off` counts clients disconnected because they do not read.
        """
        self._call = call
        self._transport = transport
        self._limits = limits
        self._cut_off = cut_off
        # the response head names the workers on which the answers run when the head is sent
        self.answers: Sequence[Choice] = ()
        self._written = 0
        self._seen = 0  # bytes that had left our buffer at the last check
        self._moved_at: float | None = None  # time of the last progress; None while no data waits
        # Time of the request's arrival, or of the last comment before the first token.
        self._quiet_at = call.arrived
        # bytes written by that time; while this equals `_written`, no token has been written
        self._quiet_bytes = 0
        self.parts: list[bytes] = []
        self.started = False
        self.ended = False

    def end(self, last: bytes) -> None:
        """Append the last part, and write everything."""
        self.parts.append(last)
        self.ended = True
        self.flush()

    def flush(self) -> None:
        """Write the collected parts as one chunk, with one system call per event-loop iteration."""
        parts = self.parts
        if not parts:
            return
        if self._call.head.chunked:
            parts.insert(0, b"%x\r\n" % sum(map(len, parts)))
            parts.append(b"\r\n0\r\n\r\n" if self.ended else b"\r\n")
        if not self.started:
            self.started = True
            headers = self._call.headers | worker_headers(self.answers)
            parts.insert(0, response_head(self._call.head, headers))
        payload = b"".join(parts)  # joined only once, because answers can be large
        parts.clear()
        transport = self._transport
        if transport.is_closing():
            return
        transport.write(payload)
        self._written += len(payload)
        if transport.get_write_buffer_size() > self._limits.buffer_bytes_max:
            self._cut("the client does not read its response")

    def keep_alive(self, comment: bytes = KEEP_ALIVE) -> None:
        """Send an SSE comment, which clients ignore, when nothing else may be sent for a while."""
        self.parts.append(comment)
        self.flush()

    def await_token(self, now: float) -> None:
        """Send the head and a comment if no token has come for `early_head_s`, so that no proxy closes the connection as
        idle.

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
        """Disconnect a client that does not read. This also cancels its request if that is still running."""
        if self.answers:
            log.warning("client_cut_off", request=self._call.id, why=why)
        self._cut_off.inc()
        self.abort()

    @property
    def socket(self) -> socket.socket:
        """The connection's socket."""
        found: socket.socket = self._transport.get_extra_info("socket")
        return found

    @property
    def waiting(self) -> int:
        """Number of bytes that the client has not read yet."""
        return 0 if self._transport.is_closing() else self._transport.get_write_buffer_size()

    def release(self) -> None:
        """Drop the references to the answers, so that a finished request is freed without the garbage collector."""
        self.answers = ()

    def abort(self) -> None:
        """Close the client's connection at once, and discard unsent data."""
        self._transport.abort()


class StreamedResponse(web.StreamResponse):
    """Represents for aiohttp a response that an SseStream has already written."""

    def __init__(self, *, keep: bool) -> None:
        super().__init__()
        self._keep_alive = keep

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        self._eof_sent = True


def response_head(head: Head, headers: Mapping[str, str]) -> bytes:
    """Return the head of a response with status 200 and an event stream, for a request with this head."""
    lines = [head_beginning(head.version, int(time.time()))]  # noqa: TID251 (shown to the client, compared with nothing)
    lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
    if head.chunked:
        lines.append("Transfer-Encoding: chunked\r\n")
    lines.append("\r\n" if head.keep else "Connection: close\r\n\r\n")
    return "".join(lines).encode("latin-1", "replace")


@lru_cache(2)  # HTTP versions; formats the date only once per second
def head_beginning(version: tuple[int, int], second: int) -> str:
    """Return the part that is common to all response heads of this second (seconds since 1970, UTC)."""
    return (
        f"HTTP/{version[0]}.{version[1]} 200 OK\r\n"
        "Content-Type: text/event-stream; charset=utf-8\r\n"
        "Cache-Control: no-cache\r\n"
        "X-Accel-Buffering: no\r\n"
        f"Date: {formatdate(second, usegmt=True)}\r\n"
    )
