"""The frontends of one worker: their connections, streams and beats, and the bounds on them.

    connects ── hello ──▶ a frontend         too many, of all or of one address: the oldest connection without a hello
        └── a stranger until then            makes room, or else, once the new one has proved itself, the frontend without
                                             a stream that sent no request for longest; if all have streams, the new one

Strangers that connect and send nothing keep no frontend out. Neither does a compromised worker that holds connections with
the fleet's key: those that are not used make room for the next.

While a frontend keeps up, every engine step is one frame; but steps that follow one another within a millisecond leave
together, unless a stream begins or ends with one. While it does not keep up, steps gather in a backlog, one chunk per
stream (`wire.join`), and leave as one frame when it reads again: the slower the reader, the fewer and fuller the frames. The
backlog is bounded in bytes and in time; past either bound the connection is cut, and the frontend's streams with it.

A frame goes to each frontend at least every 100 ms while that frontend has streams open, every second otherwise, to all of
those at once. Where no step has been sent, that is a beat; while steps are, one comes every 0.25 s. A beat carries the
engine's phase and its age, because a stuck engine behind a live loop shows only there.

A stream begins in its prefill, decodes from its first output on, and ends. Canaries are not users' requests: they have
streams, and are not counted.
"""

import asyncio
import socket
import time
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, cast

import structlog

from events import wire
from events.fleet_key import FleetKey
from events.wire import Beat, Chunk, Generate, Sampling, Step, ToFrontend
from workers.counters import DrainState, WorkerCounters
from workers.engines.engine import Engine

TOKEN_BYTES = 5  # at most, in msgpack
LOGPROB_BYTES = 16
CHUNK_BYTES = 32
USER_TIMEOUT_MS = 10_000  # unacknowledged bytes for that long: the frontend's host is gone
TICK_S = 0.08  # leaves a timer 20 ms of lateness before 100 ms have passed
LOAD_S = 0.24  # how old the last beat gets while steps are sent
IDLE_BEAT_S = 1.0
HELLO_S_MAX = 5.0  # a connection without a hello is closed after this

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits on what is buffered for a frontend that does not read, in bytes and seconds."""

    buffer_bytes: int = 256 * 1024  # unsent bytes beyond which steps gather
    backlog_bytes_max: int = (
        8 * 1024 * 1024
    )  # gathered, estimated from above; one frame, so below FRAME_BYTES_MAX
    stalled_s_max: float = 10.0  # without reading anything
    burst_s: float = 0.001  # steps that follow one another faster leave together: no useful model has such


class FrontendConnection:
    """The sending end of one frontend's connection, and its streams. `FrontendProtocol` has the receiving end."""

    def __init__(self, transport: asyncio.BaseTransport, patience: Patience) -> None:
        self.frontend = ""  # until its hello
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""  # its host's; empty: it came through the broker
        self.streams: dict[int, int] = {}  # stream number -> the engine's key
        self.batch: list[Chunk] = []  # this step's output, until `flush`
        self.blackholed = False  # a rehearsal: everything is swallowed, both ways
        self.tainted = False  # a blackhole swallowed something: the connection cannot be trusted again
        self.opened_at = asyncio.get_running_loop().time()
        self.used_at = 0.0  # of its hello, or its last request
        self.beaten_at = 0.0
        self.stepped_at = 0.0  # when a step was sent last
        self._patience = patience
        self._transport: asyncio.Transport | None = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=patience.buffer_bytes)
        _tune(transport.get_extra_info("socket"))
        self._paused_at: float | None = None
        self._backlog: list[Chunk] = []
        self._last: dict[int, Chunk] = {}  # of the backlog, by stream
        self._backlog_bytes = 0
        self._leaving: asyncio.TimerHandle | None = None  # sends the backlog, while the frontend reads

    def pause(self) -> None:
        """Gather steps from now on: the frontend does not keep up."""
        self._paused_at = asyncio.get_running_loop().time()

    def resume(self) -> None:
        """Send what has gathered: the frontend reads again."""
        self._paused_at = None
        self._send_backlog()

    def lost(self) -> None:
        """Send nothing more: the transport is closed."""
        self._transport = None
        if self._leaving is not None:
            self._leaving.cancel()

    def send(self, frame: ToFrontend) -> None:
        """Write one frame, behind all steps that it follows; while the frontend does not read, before them."""
        if self._leaving is not None and self._paused_at is None:
            self._send_backlog()
        self._write(frame)

    def _write(self, frame: ToFrontend) -> None:
        if self.blackholed:
            self.tainted = True
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.encode(frame))

    def flush(self) -> None:
        """Send this step's batch as one frame, or gather it: in a burst of steps, or while the frontend does not keep up."""
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
    def sock(self) -> socket.socket | None:
        """Its socket; None behind the broker, and once it is lost."""
        return None if self._transport is None else self._transport.get_extra_info("socket")

    @property
    def behind(self) -> bool:
        """Whether the frontend has unread output, so that a beat carries nothing new."""
        return self._paused_at is not None

    def cut_if_stalled(self, now: float) -> None:
        """End a connection whose frontend has not read for too long."""
        if self._paused_at is not None and now - self._paused_at > self._patience.stalled_s_max:
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


@dataclass(frozen=True, slots=True)
class FrontendLimits:
    """How many connections one worker takes. Each frontend has one, and each controller."""

    total_max: int = 512  # 0: any number
    per_address_max: int = (
        256  # half of them: no host has all. Behind the broker there are no addresses. 0: any number
    )


class FrontendConnections:
    """The open connections of one worker."""

    def __init__(
        self, worker: str, counters: WorkerCounters, limits: FrontendLimits, key: FleetKey | None = None
    ) -> None:
        """`key`: the fleet's, which frontends must know."""
        self.key = key
        self.blackholed = False  # a rehearsal: everything is swallowed, both ways
        self.open: set[FrontendConnection] = set()
        self._strangers: dict[FrontendConnection, None] = {}  # the oldest first
        self._by_address: Counter[str] = Counter()
        self._counters = counters
        self._limits = limits
        self.none_open = asyncio.Event()  # a flag
        self.none_open.set()
        self._worker = worker

    @property
    def any_greeted(self) -> bool:
        """Whether a frontend is connected, which could still send a request."""
        return any(connection.frontend for connection in self.open)

    def add(self, connection: FrontendConnection) -> None:
        """Take a connection in, and break another stranger's if there are too many."""
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
        """Return which bound is exceeded with a connection of this address; empty if none is."""
        limits = self._limits
        if address and 0 < limits.per_address_max < self._by_address[address]:
            return "connections_of_address"
        return "connections" if 0 < limits.total_max < len(self.open) else ""

    def _break(self, connection: FrontendConnection, why: str) -> None:
        self._counters.refused(why)
        log.warning("connection_refused", worker=self._worker, why=why, open=len(self.open))
        self.remove(connection)
        connection.abort()

    def greeted(self, connection: FrontendConnection) -> bool:
        """Note that a stranger is a frontend; False: it is broken, since all others that the bound counts have streams."""
        self._strangers.pop(connection, None)
        bound = self._exceeded(connection.address)
        if not bound:
            return True
        unused = (
            one
            for one in self.open
            if one.frontend
            and not one.streams
            and (bound == "connections" or one.address == connection.address)
        )
        least = min(unused, key=lambda one: one.used_at if one is not connection else float("inf"))
        self._break(least, f"{bound}_unused" if least is not connection else bound)
        return least is not connection

    def cut_strangers(self, since: float) -> None:
        """Break the connections that were made before `since` and have sent no hello."""
        for connection in [one for one in self._strangers if one.opened_at < since]:
            self._counters.refused("hello_wait")
            self.remove(connection)
            connection.abort()

    def remove(self, connection: FrontendConnection) -> None:
        """Forget a connection that is lost, or broken."""
        if connection not in self.open:
            return
        self.open.remove(connection)
        self._strangers.pop(connection, None)
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]
        if not self.open:
            self.none_open.set()

    def tell(self, frame: ToFrontend) -> None:
        """Send a frame to every frontend."""
        for connection in self.open:
            if connection.frontend:
                connection.send(frame)

    def flush(self) -> None:
        """Send each frontend its part of the present step."""
        for connection in self.open:
            if connection.batch:
                connection.flush()

    def close(self) -> None:
        """Send what is gathered and buffered, then close."""
        for connection in list(self.open):
            connection.close()

    def abort(self) -> None:
        """Break all of them at once: nothing that is buffered leaves."""
        for connection in list(self.open):
            connection.abort()

    def blackhole(self, on: bool) -> None:
        """Swallow everything both ways without closing. Healed, connections that lost something are broken: a stream with a
        hole in it must not continue."""
        self.blackholed = on
        for connection in list(self.open):
            connection.blackholed = on
            if connection.tainted and not on:
                connection.abort()


class Heartbeats:
    """Beats to the frontends of one worker."""

    def __init__(self, engine: Engine, connections: FrontendConnections, drain: DrainState) -> None:
        self._engine = engine
        self._connections = connections
        self._drain = drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._due = 0.0  # when
        self._idle_due = 0.0  # when frontends without streams are owed the next beat

    def start(self) -> None:
        """Begin to beat, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._next(self._loop.time() + TICK_S)

    def stop(self) -> None:
        """Beat no more."""
        if self._ticking is not None:
            self._ticking.cancel()

    def beat(self) -> Beat:
        """Return the engine's phase and load."""
        engine, draining = self._engine, self._drain.draining
        phase = engine.phase()
        age_ms = max(0.0, (time.monotonic() - phase.since) * 1e3) if phase.name != "idle" else 0.0
        return Beat(phase.name, age_ms, phase.prefill_tokens, engine.load(), draining, engine.ranks())

    def beat_all(self) -> None:
        """Beat to every frontend at once."""
        self._connections.tell(self.beat())

    def hasten(self) -> None:
        """Note that a stream has begun: its frontend is owed frames sooner than one without streams."""
        assert self._loop is not None
        due = self._loop.time() + TICK_S
        if due < self._due:
            self._next(due)

    def _tick(self) -> None:
        """Beat where a frame is owed, and tick again when the next may be: a thousand idle servers share a loop."""
        assert self._loop is not None
        now = self._loop.time()
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
        """Tick at `due`, and no sooner."""
        assert self._loop is not None
        if self._ticking is not None:
            self._ticking.cancel()
        self._due = due
        self._ticking = self._loop.call_at(due, self._tick)


def _owed(connection: FrontendConnection) -> float:
    """Return when a connection with streams is owed the next beat. Steps show that the worker lives; only beats carry its
    load."""
    return min(max(connection.beaten_at, connection.stepped_at) + TICK_S, connection.beaten_at + LOAD_S)


def _begins_or_ends(chunk: Chunk) -> bool:
    return chunk.finish is not None or chunk.error is not None or chunk.cached_tokens is not None


def _bytes(chunk: Chunk) -> int:
    """Return an upper bound of a chunk's size on the wire, in bytes."""
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


class RequestOrigin(NamedTuple):
    """What a request was when it came here, without its tokens."""

    request: str
    prompt_tokens: int
    replayed: int  # tokens of the answer that it brought along
    sampling: Sampling

    @classmethod
    def of(cls, request: Generate) -> "RequestOrigin":
        """Return what is remembered of a request."""
        prompt = request.prompt_tokens
        return cls(request.request, prompt, len(request.tokens) - prompt, request.sampling)


@dataclass(slots=True)
class Stream:
    """One open stream: where its output goes."""

    connection: FrontendConnection
    number: int  # by which its frontend knows it
    canary: bool
    begun: float  # loop time, in seconds
    asked: RequestOrigin
    turn: int = 0  # of the trust in what is computed here, when it began
    held: list[tuple[int, Chunk]] | None = (
        None  # output before its frontend may have it; None: nothing is held
    )
    decodes: bool = False  # its prompt is computed: it has output
    leaving: bool = False  # it is on its way out, with its KV cache


class StreamTable:
    """All open streams of one worker, by the engine's keys."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        """`heartbeats`: those of the frontends, due sooner once a stream has begun."""
        self._heartbeats = heartbeats
        self.by_key: dict[int, Stream] = {}
        self.users = 0  # streams that are not canaries
        self._prefills = 0  # of these, still without output
        self.all_ended = asyncio.Event()  # a flag: no user's stream is open
        self.all_ended.set()
        self.all_decode = asyncio.Event()  # a flag: no user's stream is in its prefill
        self.all_decode.set()

    def begin(self, key: int, stream: Stream) -> None:
        """Take a stream in, for its frontend too."""
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
        """Note that a stream's prefill is over."""
        stream.decodes = True
        if not stream.canary:
            self._prefills -= 1
            if not self._prefills:
                self.all_decode.set()

    def end(self, key: int) -> None:
        """Forget a stream that is over. Unknown keys are ignored."""
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
