"""One frontend's connection to this worker: frames in, frames out, and what happens when the frontend does not read.

While the frontend keeps up, every engine step is one frame; but steps that follow one another within a millisecond leave
together, unless a stream begins or ends with one. While it does not keep up, steps gather in a backlog, one chunk per
stream (`wire.join`), and leave as one frame when it reads again: the slower the reader, the fewer and fuller the frames. What is
gathered is bounded in bytes and in time; past either bound the connection is cut, and the frontend's streams with it.
"""

import asyncio
import socket
from dataclasses import dataclass
from typing import Protocol, cast

import msgspec
import structlog

from events import wire
from events.fleet_key import FleetKey, Stranger, WorkerHandshake
from events.wire import Cancel, Chunk, Generate, Hello, Proof, Reserve, Ship, Stay, Step, ToFrontend

TOKEN_BYTES = 5  # at most, in msgpack
LOGPROB_BYTES = 16
CHUNK_BYTES = 32
HELLO_BYTES_MAX = 4096  # of a frame from somebody who has not said who he is
USER_TIMEOUT_MS = 10_000  # unacknowledged bytes for that long: the frontend's host is gone

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long, and for how much, a frontend that does not read is borne with."""

    buffer_bytes: int = 256 * 1024  # unsent bytes beyond which steps gather
    backlog_bytes_max: int = (
        8 * 1024 * 1024
    )  # gathered, estimated from above; one frame, so below FRAME_BYTES_MAX
    stalled_s_max: float = 10.0  # without reading anything
    burst_s: float = 0.001  # steps that follow one another faster leave together: no useful model has such


class StreamServer(Protocol):
    """What a connection tells its server."""

    blackholed: bool
    patience: Patience

    def opened(self, connection: "FrontendConnection") -> None: ...
    def greeted(self, connection: "FrontendConnection", hello: Hello) -> None: ...
    def strange(self, connection: "FrontendConnection", why: str) -> None: ...
    def generate(self, connection: "FrontendConnection", request: Generate) -> None: ...
    def cancel(self, connection: "FrontendConnection", frame: Cancel) -> None: ...
    def reserve(self, connection: "FrontendConnection", frame: Reserve) -> None: ...
    def ship(self, connection: "FrontendConnection", frame: Ship) -> None: ...
    def stay(self, connection: "FrontendConnection", frame: Stay) -> None: ...
    def closed(self, connection: "FrontendConnection") -> None: ...


class FrontendConnection(asyncio.Protocol):
    """The worker's end of one connection."""

    def __init__(self, server: StreamServer, key: FleetKey | None = None) -> None:
        """`key`: the fleet's, which the frontend must know, too."""
        self.frontend = ""  # until it says hello
        self.address = ""  # its host's; empty: it came through the broker
        self.streams: dict[int, int] = {}  # stream number -> the engine's key
        self.batch: list[Chunk] = []  # this step's output, until `flush`
        self.tainted = False  # a blackhole swallowed something: the connection cannot be trusted again
        self.opened_at = 0.0
        self.used_at = 0.0  # when it said hello, or asked for something last
        self.beaten_at = 0.0
        self.stepped_at = 0.0  # when a step was sent last
        self._server = server
        self._handshake = WorkerHandshake(key)
        self._transport: asyncio.Transport | None = None
        self._splitter = wire.Splitter(HELLO_BYTES_MAX)
        self._paused_at: float | None = None
        self._backlog: list[Chunk] = []
        self._last: dict[int, Chunk] = {}  # of the backlog, by stream
        self._backlog_bytes = 0
        self._leaving: asyncio.TimerHandle | None = (
            None  # when it does, unless the frontend has stopped reading
        )

    # --- the transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._server.patience.buffer_bytes)
        _tune(transport.get_extra_info("socket"))
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        self.opened_at = asyncio.get_running_loop().time()
        self._server.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._server.blackholed:
            self.tainted = True
            return
        try:
            for body in self._splitter.feed(data):
                self._take(wire.to_worker.decode(body))
        except (wire.BadFrame, msgspec.MsgspecError) as error:
            log.warning("bad_frame", frontend=self.frontend, error=str(error))
            self.abort()
        except Stranger as error:
            self._server.strange(self, str(error))
            self.abort()

    def eof_received(self) -> bool:
        return False  # nobody reads any more: let the transport close

    def pause_writing(self) -> None:
        self._paused_at = asyncio.get_running_loop().time()

    def resume_writing(self) -> None:
        self._paused_at = None
        self._send_backlog()

    def _send_backlog(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if self._backlog:
            chunks, self._backlog = self._backlog, []
            self._last.clear()
            self._backlog_bytes = 0
            self.stepped_at = asyncio.get_running_loop().time()
            self._write(Step(chunks))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._leaving is not None:
            self._leaving.cancel()
        self._server.closed(self)

    # --- frames

    def _take(self, frame: wire.ToWorker) -> None:
        match frame:
            case Generate() if self.frontend:
                self._server.generate(self, frame)
            case Cancel() if self.frontend:
                self._server.cancel(self, frame)
            case Reserve() if self.frontend:
                self._server.reserve(self, frame)
            case Ship() if self.frontend:
                self._server.ship(self, frame)
            case Stay() if self.frontend:
                self._server.stay(self, frame)
            case Hello() if not self.frontend and frame.version == wire.VERSION:
                self._meet(frame)
            case Proof() if not self.frontend:
                self._welcome(self._handshake.proven(frame))
            case Hello():
                raise wire.BadFrame(
                    f"hello of version {frame.version}; this worker speaks {wire.VERSION}, once"
                )
            case _:
                raise wire.BadFrame("a frame before hello")

    def _meet(self, hello: Hello) -> None:
        challenge = self._handshake.challenge(hello)
        if challenge is None:
            self._welcome(hello)
        else:
            self._write(challenge)

    def _welcome(self, hello: Hello) -> None:
        self.frontend = hello.frontend or "unnamed"
        self._splitter.frame_bytes_max = wire.FRAME_BYTES_MAX
        self._server.greeted(self, hello)

    def send(self, frame: ToFrontend) -> None:
        """Write one frame, behind all steps that it follows; while the frontend does not read, before them."""
        if self._leaving is not None and self._paused_at is None:
            self._send_backlog()
        self._write(frame)

    def _write(self, frame: ToFrontend) -> None:
        if self._server.blackholed:
            self.tainted = True
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.encode(frame))

    def flush(self) -> None:
        """Send this step's batch as one frame, or gather it: in a burst of steps, or while the frontend does not keep up."""
        batch, self.batch = self.batch, []
        if self._server.blackholed:
            self.send(Step(batch))
            return
        if self._paused_at is not None:
            self._gather(batch)
            return
        loop, burst_s = asyncio.get_running_loop(), self._server.patience.burst_s
        now, first = loop.time(), not self._backlog
        leaves = (first and now - self.stepped_at >= burst_s) or any(map(_begins_or_ends, batch))
        if first and leaves:
            self.stepped_at = now
            self._write(Step(batch))
            return
        self._gather(batch)
        if leaves:
            self._send_backlog()
        elif self._leaving is None:
            self._leaving = loop.call_later(burst_s, self._leave)

    def _leave(self) -> None:
        """A burst has lasted long enough."""
        self._leaving = None
        if self._paused_at is None:
            self._send_backlog()

    def _gather(self, batch: list[Chunk]) -> None:
        for chunk in batch:
            self._backlog_bytes += _bytes(chunk)
            earlier = self._last.get(chunk.stream)
            if earlier is None or not wire.join(earlier, chunk):
                self._backlog.append(chunk)
                self._last[chunk.stream] = chunk
                self._backlog_bytes += CHUNK_BYTES
        if self._backlog_bytes > self._server.patience.backlog_bytes_max:
            log.warning("frontend_cut", frontend=self.frontend, reason="backlog", bytes=self._backlog_bytes)
            self.abort()

    @property
    def sock(self) -> socket.socket | None:
        """Its socket; None where it has none: behind the broker, or once it is lost."""
        return None if self._transport is None else self._transport.get_extra_info("socket")

    @property
    def behind(self) -> bool:
        """Whether the frontend has unread output, so that a beat would say nothing new."""
        return self._paused_at is not None

    def cut_if_stalled(self, now: float) -> None:
        """End a connection whose frontend has not read for too long."""
        if self._paused_at is not None and now - self._paused_at > self._server.patience.stalled_s_max:
            log.warning("frontend_cut", frontend=self.frontend, reason="stalled", streams=len(self.streams))
            self.abort()

    def abort(self) -> None:
        """Break the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Send what is gathered and buffered, then close."""
        self._send_backlog()
        if self._transport is not None:
            self._transport.close()


def _begins_or_ends(chunk: Chunk) -> bool:
    return chunk.finish is not None or chunk.error is not None or chunk.cached_tokens is not None


def _bytes(chunk: Chunk) -> int:
    """Return an upper bound of what a chunk says, in bytes on the wire."""
    size = TOKEN_BYTES * len(chunk.tokens)
    if chunk.logprobs:
        size += sum(LOGPROB_BYTES * (1 + len(logprob.top)) for logprob in chunk.logprobs)
    if chunk.text:
        size += 4 * len(chunk.text)
    return size + (len(chunk.error) * 4 if chunk.error else 0)


def _tune(sock: socket.socket | None) -> None:
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
