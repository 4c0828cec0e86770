"""The request plane's server: streams of many frontends over one engine.

The engine knows keys, frontends know stream numbers; a flight ties the two together, and whatever the engine still says
about a flight that is over is dropped here. All of this lives on one event loop; only `deliver` may be called from
another thread.

From its loop the server says that it lives: a frame to each frontend at least every 100 ms while that frontend has
streams open, every second otherwise, to all of those at once. Where no step has been sent, that is a beat; while steps
are, one comes every 0.25 s.
It carries what the engine does and for how long, because a stuck engine behind a live loop can only be told by that.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from events.wire import Beat, Chunk, Declined, Generate, Hello, Reserve, Ship, Stay, Welcome
from workers.connection import Connection, Patience
from workers.counters import Counters, Ends
from workers.engines.engine import Engine
from workers.flights import Flight, Flights
from workers.listening import BACKLOG, listening
from workers.moving.moves import Moves
from workers.moving.state import Asked

if TYPE_CHECKING:
    from events.channels import Channels, Door

TICK_S = 0.08  # leaves a timer 20 ms of lateness before 100 ms have passed
LOAD_S = 0.24  # how old the last beat gets while steps are sent
IDLE_BEAT_S = 1.0
HELLO_S_MAX = 5.0  # a connection that says nothing is closed
CONNECTIONS_MAX = 512
STREAMS_PER_CONNECTION_MAX = 4096
FAULTS = ("engine_error", "non_finite", "stream_incomplete")  # errors that are the engine's own
LEAVES = "engine_shutdown: this worker is leaving"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why new requests are turned away. Canaries are let through while the worker may come back."""

    reason: str
    canaries_too: bool


class Server:
    """Serves one engine on one port, or behind the broker."""

    def __init__(
        self, *, worker: str, instance: str, engine: Engine, patience: Patience | None = None
    ) -> None:
        self.worker, self.instance = worker, instance
        self.counters = Counters()
        self.patience = patience or Patience()
        self.blackholed = False
        self.refusal: Refusal | None = None
        self.address = ("", 0)
        self.on_fault: Callable[[str], None] = _ignore  # told of each engine error that a stream ends with
        self.moves = Moves(engine, instance, self, self.counters)
        self.moves.source.on_stay = self._stays
        self._engine = engine
        self._flights = Flights()
        self._connections: set[Connection] = set()
        self._keys = itertools.count(1)
        self._alone = asyncio.Event()  # a flag: no connection is open
        self._alone.set()
        self._deregistered = False
        self._ends_before: Ends | None = None  # when it began to drain, or had last said how it goes
        self._drained_by: set[str] = set()  # frontends that drain it, before it was told to drain
        self._sending_on = ""  # why streams that decode are sent elsewhere; "": they are not
        self._listener: asyncio.Server | Door | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._due = 0.0  # when
        self._idle_due = 0.0  # when frontends without streams are owed the next beat
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and return the address. Raise OSError if the port cannot be had."""
        sock = listening(host, port)
        loop = self._begin()
        self._listener = await loop.create_server(lambda: Connection(self), sock=sock, backlog=BACKLOG)
        self.address = sock.getsockname()[:2]
        return self.address

    async def start_behind(self, channels: "Channels", subject: str) -> None:
        """Let frontends in through the broker, on this subject."""
        self._begin()
        self._listener = await channels.listen(subject, lambda: Connection(self))

    def _begin(self) -> asyncio.AbstractEventLoop:
        loop = self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._next(loop.time() + TICK_S)
        return loop

    async def close(self, deadline_s: float = 1.0) -> None:
        """Stop listening, send what is buffered, and break whatever has not closed by then."""
        if self._ticking is not None:
            self._ticking.cancel()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self.moves.close()
                await self._alone.wait()
        for connection in list(self._connections):
            connection.abort()

    def abort(self) -> None:
        """Break every connection at once: nothing that is buffered leaves."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.abort()

    # --- what connections tell

    def opened(self, connection: Connection) -> None:
        """Take a connection in, or break it if there are too many."""
        self._connections.add(connection)
        self._alone.clear()
        if len(self._connections) > CONNECTIONS_MAX:
            log.warning("connection_refused", worker=self.worker, open=CONNECTIONS_MAX)
            connection.abort()

    def greeted(self, connection: Connection, hello: Hello) -> None:
        """Answer a hello: who this is, and how it fares."""
        connection.send(Welcome(self.worker, self.instance, self._engine.identity.model))
        connection.beaten_at = connection.opened_at
        connection.send(self.beat())

    def closed(self, connection: Connection) -> None:
        """Take a lost connection's streams out of the engine."""
        self._connections.discard(connection)
        if not self._connections:
            self._alone.set()
        for key in list(connection.streams.values()):
            self._drop(key)

    def cancel(self, connection: Connection, stream: int, why: str) -> None:
        """Take one stream out of the engine."""
        key = connection.streams.get(stream)
        if key is None:
            return
        if why == "drained" and not self.draining:  # its frontend has heard of the drain first: it begins now
            self._ends_before = self._ends_before or self.counters.ends
            self._drained_by.add(connection.frontend)
        self._drop(key, why)

    def generate(self, connection: Connection, request: Generate) -> None:
        """Hand a request to the engine, or say at once why not."""
        if connection.frontend in self._drained_by:  # the drain was taken back before this worker heard of it
            self._drained_by.clear()
            self._ends_before = None
        if error := self._objection(connection, request, request.stream):
            connection.batch.append(Chunk(request.stream, [], error=error))
            connection.flush()
            return
        assert self._loop is not None
        key = next(self._keys)
        asked = Asked.of(request)
        turn = self.moves.trust.turns
        flight = Flight(connection, request.stream, request.canary, self._loop.time(), asked, turn)
        self._flights.begin(key, flight)
        self.counters.requests += not request.canary
        self._hasten()
        self._engine.submit(key, request)

    def _objection(self, connection: Connection, request: Generate, stream: int) -> str | None:
        if self.refusal and (self.refusal.canaries_too or not request.canary):
            return self.refusal.reason
        if stream in connection.streams:
            return f"invalid_request: stream {stream} is open already on this connection"
        if len(connection.streams) >= STREAMS_PER_CONNECTION_MAX:
            return f"overloaded: {STREAMS_PER_CONNECTION_MAX} streams on one connection"
        return None

    def _drop(self, key: int, why: str = "gone") -> None:
        if key in self.moves.target:  # it is freed once nothing is copied into it any more
            self.moves.target.drop(key)
            return
        moved = self.moves.source.forget(key)
        self._engine.cancel(key)
        flight = self._flights.by_key[key]
        if not (moved or flight.canary):
            self._count(flight, why)
        self._flights.land(key)

    def _count(self, flight: Flight, why: str) -> None:
        assert self._loop is not None
        if why == "complete":
            self.counters.finished(self._loop.time() - flight.begun)
        elif why in ("elsewhere", "drained"):
            self.counters.left += 1
        else:
            self.counters.cancelled += 1

    # --- planned moves: docs/kv-transfer.md

    def reserve(self, connection: Connection, frame: Reserve) -> None:
        """Keep room for a stream that is to come with its KV cache, or say why not."""
        error = self._objection(connection, frame.request, frame.stream)
        if error is None and self._deregistered:
            error = LEAVES
        if error is None:
            self.moves.target.reserve(next(self._keys), connection, frame)
        else:
            self.counters.moved("in", "declined")
            connection.send(Declined(frame.stream, error))

    def ship(self, connection: Connection, frame: Ship) -> None:
        """Send a stream's KV cache to a target, or say why not."""
        key = connection.streams.get(frame.stream, 0)
        flight = self._flights.by_key.get(key)
        if flight is None:
            connection.send(Declined(frame.stream, "there is no such stream here, or no longer"))
        else:
            self.moves.source.ship(key, flight, frame.grants)

    def stay(self, connection: Connection, frame: Stay) -> None:
        """Break a shipment off. The stream goes on here; if it is over, nothing is left to do."""
        self.moves.source.stay(connection.streams.get(frame.stream, 0))
        self._stays()

    def _stays(self) -> None:
        if self._sending_on:
            self.send_on(self._sending_on)

    def expect(self, key: int, flight: Flight) -> None:
        """Expect the first words of a stream that has come with its KV cache, and hold them."""
        flight.turn = self.moves.trust.turns
        self._flights.begin(key, flight)
        self._flights.first_output(flight)
        self._hasten()

    def let_speak(self, key: int) -> None:
        """Say what was held, and hold no more."""
        self.counters.requests += 1
        flight = self._flights.by_key[key]
        held, flight.held = flight.held, None
        self._deliver(held or [])

    def turn_away(self, key: int) -> None:
        """Expect it no more."""
        self._flights.land(key)

    # --- what the engine says

    def deliver(self, out: list[tuple[int, Chunk]]) -> None:
        """Take one step's output, from any thread, and send each frontend its part as one frame."""
        if threading.get_ident() == self._thread:
            self._deliver(out)
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, out)

    def _deliver(self, out: list[tuple[int, Chunk]]) -> None:
        flights, tokens, prefilled = self._flights.by_key, 0, False
        for key, chunk in out:
            flight = flights.get(key)
            if flight is None:
                continue
            if flight.held is not None:
                flight.held.append((key, chunk))
                continue
            chunk.stream = flight.stream
            flight.connection.batch.append(chunk)
            tokens += len(chunk.tokens)
            if not flight.decodes and (chunk.tokens or chunk.text):
                self._flights.first_output(flight)
                prefilled = True
            if chunk.finish is not None or chunk.error is not None:
                self._end(key, flight, chunk)
        self.counters.tokens += tokens
        if prefilled and self._sending_on:
            self._send_on()
        for connection in self._connections:
            if connection.batch:
                connection.flush()

    def _end(self, key: int, flight: Flight, chunk: Chunk) -> None:
        assert self._loop is not None
        if chunk.error is not None and chunk.error.startswith(FAULTS):
            self.on_fault(chunk.error)
        if chunk.error is not None and chunk.error.startswith("non_finite"):
            self.moves.trust.lose("non_finite", chunk.error)
        moved = self.moves.source.forget(key)
        if not (moved or flight.canary):  # a canary is nobody's request
            if chunk.error is None:
                self.counters.finished(self._loop.time() - flight.begun)
            else:
                self.counters.failed(chunk.error)
        self._flights.land(key)

    # --- draining

    @property
    def in_flight(self) -> int:
        """Users' streams in the air; canaries do not count."""
        return self._flights.users

    @property
    def landed(self) -> asyncio.Event:
        """A flag: no user's stream is in the air."""
        return self._flights.landed

    @property
    def prefilled(self) -> asyncio.Event:
        """A flag: no user's stream is still in its prefill."""
        return self._flights.prefilled

    @property
    def ships(self) -> bool:
        """Whether streams can leave with their KV cache."""
        return bool(self._engine.kv)

    @property
    def has_frontends(self) -> bool:
        """Whether anybody is connected who could still send a request."""
        return any(connection.frontend for connection in self._connections)

    def end_all(self, error: str) -> None:
        """End every stream with an error. New ones are refused already, and those that were to come have been given up."""
        for key in list(self._flights.by_key):
            self._engine.cancel(key)
        self._deliver([(key, Chunk(0, [], error=error)) for key in list(self._flights.by_key)])

    def send_on(self, error: str) -> None:
        """End every user's stream that decodes, with an error; from now on, each as soon as its prefill is over. Those
        that are on their way to another worker with their KV cache need not be told."""
        self._sending_on = error
        self._send_on()
        for connection in self._connections:
            if connection.batch:
                connection.flush()

    def _send_on(self) -> None:
        moving, flights = self.moves.source, self._flights.by_key.items()
        decoding = [
            key for key, flight in flights if flight.decodes and not flight.canary and flight.held is None
        ]
        for key in [key for key in decoding if key not in moving]:
            flight = self._flights.by_key[key]
            self._engine.cancel(key)
            chunk = Chunk(flight.stream, [], error=self._sending_on)
            flight.connection.batch.append(chunk)
            self._end(key, flight, chunk)

    def deregister(self) -> None:
        """Tell every frontend to send nothing more; requests that are on their way already are still taken."""
        self._begin_account()
        self._deregistered = True
        self.moves.target.drop_all(LEAVES)  # they decode well where they are
        self._beat_all()

    def refuse(self, refusal: Refusal | None, *, tell: bool = True) -> None:
        """Turn new requests away from now on (None: no longer), and `tell` every frontend at once."""
        self.refusal = refusal
        if refusal is None:
            self._ends_before = None
        else:
            self._begin_account()
            self.moves.target.drop_all(refusal.reason)
        if tell:
            self._beat_all()

    def _begin_account(self) -> None:
        """From now on this worker drains, unless a frontend has drained it already."""
        self._ends_before = self._ends_before or self.counters.ends
        self._drained_by.clear()

    def drained(self) -> Ends:
        """Return how streams have ended since it began to drain, or since this was last asked.

        It began when the worker was told, or before that with the first stream that a frontend took away for the drain.
        """
        now = self.counters.ends
        before, self._ends_before = self._ends_before or now, now
        return now - before

    @property
    def draining(self) -> bool:
        """Whether frontends are told to send nothing new."""
        return self._deregistered or self.refusal is not None

    # --- signs of life

    def beat(self) -> Beat:
        """Return how the engine fares right now."""
        phase = self._engine.phase()
        age_ms = max(0.0, (time.monotonic() - phase.since) * 1e3) if phase.name != "idle" else 0.0
        engine = self._engine
        return Beat(phase.name, age_ms, phase.prefill_tokens, engine.load(), self.draining, engine.ranks())

    def _beat_all(self) -> None:
        beat = self.beat()
        for connection in self._connections:
            if connection.frontend:
                connection.send(beat)

    def _tick(self) -> None:
        """Beat where a frame is owed, and come back when the next one may be: a thousand idle servers share a loop."""
        assert self._loop is not None
        now = self._loop.time()
        if idle := now >= self._idle_due - TICK_S / 4:
            self._idle_due = now + IDLE_BEAT_S - TICK_S
        due, beat = self._idle_due, None
        for connection in list(self._connections):
            if not connection.frontend:
                if now - connection.opened_at > HELLO_S_MAX:
                    connection.abort()
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

    def _hasten(self) -> None:
        """A stream has begun: its frontend is owed frames sooner than one that has none."""
        assert self._loop is not None
        due = self._loop.time() + TICK_S
        if due < self._due:
            self._next(due)

    # --- rehearsals

    def blackhole(self, on: bool) -> None:
        """Swallow everything both ways without closing. Healed, connections that lost something are broken: a stream
        with a hole in it must not go on."""
        self.blackholed = on
        if not on:
            for connection in list(self._connections):
                if connection.tainted:
                    connection.abort()


def _owed(connection: Connection) -> float:
    """Return when a connection with streams is owed the next beat. Steps say that the worker lives; how loaded it is only
    beats say."""
    return min(max(connection.beaten_at, connection.stepped_at) + TICK_S, connection.beaten_at + LOAD_S)


def _ignore(reason: str) -> None:
    """Tell nobody."""
