"""The frontends of one worker: their connections, streams and heartbeats, and their limits.

    connects ── hello ──▶ a frontend
        └── a stranger until then

A connection is a stranger's until its client has sent a valid hello. If a new connection exceeds the limit on all connections or
the limit per address, one connection is closed. If the limit per address is exceeded, only connections from this address are
considered:

1. If there are strangers besides the new connection, the oldest stranger's connection is closed.
2. If there are none, the new connection stays until its hello. If a limit is still exceeded at the hello, one frontend is
   disconnected: of the frontends without streams, the one that has been idle longest.
3. If all other frontends have streams at the hello, the new connection is closed.

By these rules, clients that connect and send nothing cannot keep frontends out. Nor can a compromised worker that opens
connections with the fleet's key: such connections have no streams, and are closed in favour of new ones.

While a frontend keeps up, every engine step is sent as one frame. Steps within one millisecond of each other are sent together,
unless a stream begins or ends in one of them. While a frontend does not keep up, steps accumulate in a backlog, in which the
chunks of one stream are joined (`wire.join`). The backlog is sent as one frame when the frontend reads again. The backlog is
bounded in bytes and in time. If a bound is exceeded, the connection is closed and the frontend's streams are cancelled.

A frontend with open streams receives a frame at least every 100 ms. If no step was sent, the frame is a heartbeat (`Beat`).
While steps are sent, a heartbeat is sent every 0.24 s. Frontends without streams receive a heartbeat every second, all at the
same time. A heartbeat carries the engine's phase and the age of that phase. No other message reveals an engine that is stuck
while the event loop still runs.

A stream begins in prefill, decodes from its first output on, and ends. Canaries have streams, but do not count as users'
requests.
"""

import asyncio
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import structlog

from events import wire
from events.fleet_key import FleetKey
from events.wire import Beat, Chunk, Generate, Sampling, Step, ToFrontend
from workers.counters import DrainState, WorkerCounters
from workers.engines.engine import Engine

TOKEN_BYTES = 5  # maximum size of a token id in msgpack
LOGPROB_BYTES = 16
CHUNK_BYTES = 32
USER_TIMEOUT_MS = 10_000  # bytes unacknowledged for this long mean that the frontend's host is gone
# interval of frames to a frontend with streams; a timer may be 20 ms late before 100 ms have passed
TICK_S = 0.08
LOAD_S = 0.24  # maximum age of the last beat while steps are sent
IDLE_BEAT_S = 1.0
HELLO_S_MAX = 5.0  # a connection without a hello is closed after this

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Limits, in bytes and seconds, on what is buffered for a frontend that does not read."""

    buffer_bytes: int = 256 * 1024  # unsent bytes above which steps accumulate
    # upper estimate of the backlog, sent as one frame and therefore below FRAME_BYTES_MAX
    backlog_bytes_max: int = 8 * 1024 * 1024
    stalled_s_max: float = 10.0  # a frontend that reads nothing for this long is disconnected
    # steps closer together than this are sent as one frame; no useful model is that fast
    burst_s: float = 0.001


class FrontendConnection:
    """The sending side of one frontend's connection, and the connection's streams. `FrontendProtocol` is the receiving side."""

    def __init__(self, transport: asyncio.BaseTransport, patience: BufferLimits) -> None:
        self.frontend = ""  # empty until its hello
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""  # the host's address; empty: connected through the broker
        self.streams: dict[int, int] = {}  # stream number -> the engine's key
        self.batch: list[Chunk] = []  # this step's output, until `flush`
        self.blackholed = False  # whether a rehearsal drops all traffic in both directions
        self.tainted = False  # whether a blackhole dropped data, so that the connection cannot be used again
        self.opened_at = asyncio.get_running_loop().time()
        self.used_at = 0.0  # time of its hello, or of its last request
        self.beaten_at = 0.0
        self.stepped_at = 0.0  # time of the last step sent
        self._patience = patience
        self.transport: asyncio.Transport | None = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=patience.buffer_bytes)
        _tune(transport.get_extra_info("socket"))
        self._paused_at: float | None = None
        self._backlog: list[Chunk] = []
        self._last: dict[int, Chunk] = {}  # last chunk of each stream in the backlog
        self._backlog_bytes = 0
        self._leaving: asyncio.TimerHandle | None = None  # sends the backlog, while the frontend reads

    def pause(self) -> None:
        """Add further steps to the backlog instead of sending them, because the frontend does not keep up."""
        self._paused_at = asyncio.get_running_loop().time()

    def resume(self) -> None:
        """Send the backlog and stop accumulating, because the frontend reads again."""
        self._paused_at = None
        self._send_backlog()

    def lost(self) -> None:
        """Stop sending after the transport has been closed."""
        self.transport = None
        if self._leaving is not None:
            self._leaving.cancel()

    def send(self, frame: ToFrontend) -> None:
        """Write one frame.

        If a burst of steps (each within a millisecond of the last) waits to be sent together, send the burst first. If the
        frontend does not keep up, write the frame before the backlog.
        """
        if self._leaving is not None and self._paused_at is None:
            self._send_backlog()
        self._write(frame)

    def _write(self, frame: ToFrontend) -> None:
        if self.blackholed:
            self.tainted = True
        elif self.transport is not None and not self.transport.is_closing():
            self.transport.write(wire.encode(frame))

    def flush(self) -> None:
        """Send the chunks of the current engine step as one frame, or add them to the backlog.

        While the frontend does not keep up, chunks are added to the backlog. If the last step was sent less than a millisecond
        ago, the chunks wait in the backlog for at most a millisecond. They do not wait if a stream begins or ends in this step.
        """
        batch, self.batch = self.batch, []
        if self.blackholed:
            self.send(Step(batch))
            return
        if self._paused_at is not None:
            self._gather(batch)
            return
        loop, burst_s = asyncio.get_running_loop(), self._patience.burst_s
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
        """Send the engine steps of a burst, which have waited in the backlog for up to a millisecond."""
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
        if self._backlog_bytes > self._patience.backlog_bytes_max:
            log.warning("frontend_cut", frontend=self.frontend, reason="backlog", bytes=self._backlog_bytes)
            self.abort()

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

    @property
    def behind(self) -> bool:
        """Whether the frontend reads its output too slowly. If so, a heartbeat would only wait behind other frames."""
        return self._paused_at is not None

    def cut_if_stalled(self, now: float) -> None:
        """Abort the connection if its frontend has read nothing for more than `stalled_s_max` seconds. `now` is the loop time."""
        if self._paused_at is not None and now - self._paused_at > self._patience.stalled_s_max:
            log.warning("frontend_cut", frontend=self.frontend, reason="stalled", streams=len(self.streams))
            self.abort()

    def abort(self) -> None:
        """Abort the connection at once, without sending what is buffered."""
        if self.transport is not None:
            self.transport.abort()

    def close(self) -> None:
        """Send the backlog and all buffered bytes, then close the connection."""
        self._send_backlog()
        if self.transport is not None:
            self.transport.close()


@dataclass(frozen=True, slots=True)
class FrontendLimits:
    """Limits on the connections of one worker. Each frontend and each controller has one connection."""

    total_max: int = 512  # 0: unlimited
    # connections from one address: half of the total; 0: unlimited. No limit for connections through the broker
    per_address_max: int = 256


@dataclass(eq=False)
class FrontendConnections:
    """Tracks the open connections of one worker and closes one when a limit is exceeded."""

    worker: str
    counters: WorkerCounters
    limits: FrontendLimits
    key: FleetKey | None = None  # the fleet key that frontends must know; None: any client may connect
    blackholed: bool = False  # whether a rehearsal drops all traffic in both directions
    open: set[FrontendConnection] = field(default_factory=set)
    _strangers: dict[FrontendConnection, None] = field(default_factory=dict)  # oldest first
    _by_address: Counter[str] = field(default_factory=Counter)
    none_open: asyncio.Event = field(default_factory=asyncio.Event)  # set while no connection is open

    def __post_init__(self) -> None:
        self.none_open.set()

    @property
    def any_greeted(self) -> bool:
        """Whether any connection has sent its hello. If so, requests may still arrive."""
        return any(connection.frontend for connection in self.open)

    def add(self, connection: FrontendConnection) -> None:
        """Add a new connection. If a limit is exceeded, abort the oldest earlier connection without a hello, if any.

        If the limit per address is exceeded, only connections from the new connection's address are considered.
        """
        address = connection.address
        connection.blackholed = self.blackholed
        self.open.add(connection)
        self._strangers[connection] = None
        self._by_address[address] += 1
        self.none_open.clear()
        if bound := self._exceeded(address):
            strangers = (one for one in self._strangers if bound == "connections" or one.address == address)
            first = next(strangers)
            if first is not connection:
                self._break(first, bound)

    def _exceeded(self, address: str) -> str:
        """Return the name of the exceeded limit, the one for `address` or the one for all connections; empty if none."""
        limits = self.limits
        if address and 0 < limits.per_address_max < self._by_address[address]:
            return "connections_of_address"
        return "connections" if 0 < limits.total_max < len(self.open) else ""

    def _break(self, connection: FrontendConnection, why: str) -> None:
        self.counters.refused(why)
        log.warning("connection_refused", worker=self.worker, why=why, open=len(self.open))
        self.remove(connection)
        connection.abort()

    def greeted(self, connection: FrontendConnection) -> None:
        """Record that the client of `connection` has sent its hello and so is a frontend.

        If a connection limit is exceeded, abort one connection without streams: the one that has been idle longest. If every
        other connection has streams, abort `connection` itself.
        """
        self._strangers.pop(connection, None)
        bound = self._exceeded(connection.address)
        if not bound:
            return
        unused = (
            one
            for one in self.open
            if one.frontend
            and not one.streams
            and (bound == "connections" or one.address == connection.address)
        )
        least = min(unused, key=lambda one: one.used_at if one is not connection else float("inf"))
        self._break(least, f"{bound}_unused" if least is not connection else bound)

    def cut_strangers(self, since: float) -> None:
        """Abort connections that were opened before the loop time `since` and have sent no hello."""
        for connection in [one for one in self._strangers if one.opened_at < since]:
            self.counters.refused("hello_wait")
            self.remove(connection)
            connection.abort()

    def remove(self, connection: FrontendConnection) -> None:
        """Remove a connection that is lost or aborted. An unknown connection is ignored."""
        if connection not in self.open:
            return
        self.open.remove(connection)
        self._strangers.pop(connection, None)
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]
        if not self.open:
            self.none_open.set()

    def broadcast(self, frame: ToFrontend) -> None:
        """Send `frame` to every frontend, on each connection that has sent a hello."""
        for connection in self.open:
            if connection.frontend:
                connection.send(frame)

    def flush(self) -> None:
        """Send each frontend its chunks of the current engine step."""
        for connection in self.open:
            if connection.batch:
                connection.flush()

    def close(self) -> None:
        """Send all backlogs and buffered bytes, then close the connections."""
        for connection in list(self.open):
            connection.close()

    def abort(self) -> None:
        """Abort all connections at once; buffered output is lost."""
        for connection in list(self.open):
            connection.abort()

    def blackhole(self, on: bool) -> None:
        """While `on` is true, drop all traffic in both directions and keep the connections open.

        When the blackhole stops, abort the connections that lost data, because a stream with missing chunks must not continue.
        """
        self.blackholed = on
        for connection in list(self.open):
            connection.blackholed = on
            if connection.tainted and not on:
                connection.abort()


class Heartbeats:
    """Sends heartbeats (`Beat` frames) with the engine's phase and load to the frontends of one worker."""

    def __init__(self, engine: Engine, connections: FrontendConnections, drain: DrainState) -> None:
        self._engine = engine
        self._connections = connections
        self._drain = drain
        self._ticking: asyncio.TimerHandle | None = None
        self._due = 0.0  # time of the next tick
        self._idle_due = 0.0  # time of the next beat to frontends without streams

    def start(self) -> None:
        """Start sending heartbeats on the running event loop."""
        self._next(asyncio.get_running_loop().time() + TICK_S)

    def stop(self) -> None:
        """Stop sending heartbeats."""
        if self._ticking is not None:
            self._ticking.cancel()

    def beat(self) -> Beat:
        """Return a heartbeat with the engine's current phase, the age of the phase in milliseconds, and the engine's load."""
        engine, draining = self._engine, self._drain.draining
        phase = engine.phase()
        age_ms = max(0.0, (time.monotonic() - phase.since) * 1e3) if phase.name != "idle" else 0.0
        return Beat(phase.name, age_ms, phase.prefill_tokens, engine.load(), draining, engine.ranks())

    def beat_all(self) -> None:
        """Send a heartbeat to every frontend at once."""
        self._connections.broadcast(self.beat())

    def hasten(self) -> None:
        """Check for due heartbeats earlier than planned, because the frontend of a new stream needs a frame every 100 ms."""
        due = asyncio.get_running_loop().time() + TICK_S
        if due < self._due:
            self._next(due)

    def _tick(self) -> None:
        """Send the heartbeats that are due, and schedule the next check.

        The next check is scheduled as late as possible, because a thousand idle servers may share one event loop.
        """
        now = asyncio.get_running_loop().time()
        if idle := now >= self._idle_due - TICK_S / 4:
            self._idle_due = now + IDLE_BEAT_S - TICK_S
        due, beat = self._idle_due, None
        self._connections.cut_strangers(now - HELLO_S_MAX)
        for connection in list(self._connections.open):
            if not connection.frontend:
                continue
            connection.cut_if_stalled(now)
            owed = now >= _owed(connection) - TICK_S / 4 if connection.streams else idle
            if owed and not connection.behind:
                beat = beat or self.beat()
                connection.beaten_at = now
                connection.send(beat)
            if connection.streams:
                due = min(due, _owed(connection))
        self._next(max(now + TICK_S / 4, due))

    def _next(self, due: float) -> None:
        """Schedule the next check for due heartbeats at the loop time `due`. It replaces the check that was scheduled before."""
        if self._ticking is not None:
            self._ticking.cancel()
        self._due = due
        self._ticking = asyncio.get_running_loop().call_at(due, self._tick)


def _owed(connection: FrontendConnection) -> float:
    """Return the loop time at which a connection with streams needs its next heartbeat.

    A frame with a step postpones the heartbeat, because the frame shows that the worker is alive. A heartbeat still follows
    within 0.24 s of the last one, because only heartbeats carry the worker's load.
    """
    return min(max(connection.beaten_at, connection.stepped_at) + TICK_S, connection.beaten_at + LOAD_S)


def _begins_or_ends(chunk: Chunk) -> bool:
    if chunk.finish is not None or chunk.error is not None or chunk.cached_tokens is not None:
        return True
    return chunk.proxied is not None and chunk.proxied.status != 0


def _bytes(chunk: Chunk) -> int:
    """Return an upper bound of a chunk's size on the wire, in bytes."""
    size = TOKEN_BYTES * len(chunk.tokens)
    if chunk.logprobs:
        size += sum(LOGPROB_BYTES * (1 + len(logprob.top)) for logprob in chunk.logprobs)
    if chunk.text:
        size += 4 * len(chunk.text)
    if chunk.proxied is not None:
        size += len(chunk.proxied.body)
    return size + (len(chunk.error) * 4 if chunk.error else 0)


def _tune(sock: socket.socket | None) -> None:
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


class RequestOrigin(NamedTuple):
    """The properties of a request as it arrived at this worker, without its tokens."""

    request: str
    prompt_tokens: int
    replayed: int  # tokens of the answer that the request already contained
    sampling: Sampling

    @classmethod
    def of(cls, request: Generate) -> "RequestOrigin":
        """Return the properties of `request` that are still needed after its submission to the engine."""
        prompt = request.prompt_tokens
        return cls(request.request, prompt, max(0, len(request.tokens) - prompt), request.sampling)


@dataclass(slots=True)
class Stream:
    """One open stream, and the connection to which its output is sent."""

    connection: FrontendConnection
    number: int  # the frontend's number for this stream on the connection
    canary: bool
    begun: float  # loop time, in seconds
    asked: RequestOrigin
    turn: int = 0  # the value of `Trust.turns` when the stream began
    # output that must not be sent to the frontend yet; None: output is sent at once
    held: list[tuple[int, Chunk]] | None = None
    decodes: bool = False  # whether the stream has output, so that its prefill is over
    leaving: bool = False  # whether the stream is moving to another worker with its KV cache
    proxied: bool = (
        False  # whether the stream passes on a server's response, which no other worker can continue
    )


class StreamTable:
    """Holds all open streams of one worker, by their keys in the engine, and counts users' streams."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        """Build an empty table. Each new stream makes `heartbeats` check earlier which heartbeats are due."""
        self._heartbeats = heartbeats
        self.by_key: dict[int, Stream] = {}
        self.users = 0  # number of streams that are not canaries
        self._prefills = 0  # number of users' streams without output
        self.all_ended = asyncio.Event()  # set while no user's stream is open
        self.all_ended.set()
        self.all_decode = asyncio.Event()  # set while no user's stream is in its prefill
        self.all_decode.set()

    def begin(self, key: int, stream: Stream) -> None:
        """Add a stream to the table and to its frontend's connection."""
        connection = stream.connection
        self.by_key[key] = stream
        connection.streams[stream.number] = key
        if not stream.canary:
            self.users += 1
            self._prefills += 1
            self.all_ended.clear()
            self.all_decode.clear()
        self._heartbeats.hasten()

    def first_output(self, stream: Stream) -> None:
        """Record the first output of a stream, which ends its prefill."""
        stream.decodes = True
        if not stream.canary:
            self._prefills -= 1
            if not self._prefills:
                self.all_decode.set()

    def end(self, key: int) -> None:
        """Remove the stream `key`, which has ended. An unknown key is ignored."""
        stream = self.by_key.pop(key, None)
        if stream is None:
            return
        connection = stream.connection
        connection.streams.pop(stream.number, None)
        if not stream.decodes:
            self.first_output(stream)
        if not stream.canary:
            self.users -= 1
            if not self.users:
                self.all_ended.set()
