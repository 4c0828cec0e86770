"""The request plane's server: streams of many frontends over one engine.

All of this lives on one event loop; only `deliver` may be called from another thread. `output` says where the engine's words
go, `heartbeats` when a frontend is owed a sign of life, `drain_state` what is refused.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Protocol

import structlog

from events.fleet_key import FleetKey
from events.nats.channels import Channels
from events.wire import Cancel, Chunk, Declined, Generate, Hello, Reserve, Ship, Stay, Welcome
from workers.connection import FrontendConnection, Patience
from workers.counters import Ends, WorkerCounters
from workers.engines.engine import Engine
from workers.listening import BACKLOG, listening
from workers.migration.moves import WorkerMigrations
from workers.migration.settings import KvMoveSettings
from workers.serving.drain_state import DrainState, Refusal
from workers.serving.frontends import FrontendConnections, FrontendLimits
from workers.serving.heartbeats import Heartbeats
from workers.serving.output import StreamOutput
from workers.streams import RequestOrigin, Stream, StreamTable

STREAMS_PER_CONNECTION_MAX = 4096
FAULTS = ("engine_error", "non_finite", "stream_incomplete")  # errors that are the engine's own
LEAVES = "engine_shutdown: this worker is leaving"

log = structlog.get_logger(__name__)


class FrontendListener(Protocol):
    """What lets frontends in."""

    def close(self) -> None:
        """Let nobody in any more."""


class WorkerServer:
    """Serves one engine on one port, or behind the broker."""

    def __init__(
        self,
        *,
        worker: str,
        instance: str,
        engine: Engine,
        patience: Patience | None = None,
        kv_moves: KvMoveSettings | None = None,
        on_fault: Callable[[str], None] | None = None,
        key: FleetKey | None = None,
        limits: FrontendLimits | None = None,
    ) -> None:
        """`kv_moves`: how KV caches come and go. `on_fault` is told of each engine error that a stream ends with. `key`: which
        frontends must know, too; None: anybody may come. `limits`: how many frontends may connect."""
        self.worker, self.instance = worker, instance
        self.patience = patience or Patience()
        self.blackholed = False
        self.address = ("", 0)
        self.counters = WorkerCounters()
        self.connections = FrontendConnections(worker, self.counters, limits or FrontendLimits(), key)
        self.streams = StreamTable()
        self.engine = engine
        self._on_fault = on_fault
        self._drain = DrainState(self.counters)
        self._heartbeats = Heartbeats(engine, self.connections, self._drain)
        self.output = StreamOutput(
            engine,
            self.streams,
            self.connections,
            self.counters,
            began=self._heartbeats.hasten,
            ended=self._ended,
            is_moving=lambda key: key in self.moves.source,
        )
        self.deliver = self.output.deliver  # for the engine
        self.moves = WorkerMigrations(
            engine, instance, self.output, self.counters, self.output.stays, kv_moves
        )
        self._outgoing, self._incoming, self._trust = self.moves.source, self.moves.target, self.moves.trust
        self._keys = itertools.count(1)
        self._listener: FrontendListener | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and return the address. Raise OSError if the port cannot be had."""
        sock = listening(host, port)
        self._begin()
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: FrontendConnection(self, self.connections.key), sock=sock, backlog=BACKLOG
        )
        self.address = sock.getsockname()[:2]
        return self.address

    async def start_behind(self, channels: Channels, subject: str) -> None:
        """Let frontends in through the broker, on this subject."""
        self._begin()
        self._listener = await channels.listen(
            subject, lambda: FrontendConnection(self, self.connections.key)
        )

    def _begin(self) -> None:
        self.output.start()
        self._heartbeats.start()

    async def close(self, deadline_s: float = 1.0) -> None:
        """Stop listening, send what is buffered, and break whatever has not closed by then."""
        self._heartbeats.stop()
        if self._listener is not None:
            self._listener.close()
        self.connections.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self.moves.close()
                await self.connections.none_open.wait()
        self.connections.abort()

    def abort(self) -> None:
        """Break every connection at once: nothing that is buffered leaves."""
        if self._listener is not None:
            self._listener.close()
        self.connections.abort()

    # --- what connections tell

    def opened(self, connection: FrontendConnection) -> None:
        """Take a connection in, or break one if there are too many."""
        self.connections.add(connection)

    def greeted(self, connection: FrontendConnection, hello: Hello) -> None:
        """Answer a hello: who this is, and how it fares."""
        connection.used_at = asyncio.get_running_loop().time()
        if not self.connections.greeted(connection):
            return
        identity = self.engine.identity  # one that is not exact gives users text, and canaries tokens
        connection.send(Welcome(self.worker, self.instance, identity.model, alike=identity.exact))
        connection.beaten_at = connection.opened_at
        connection.send(self._heartbeats.beat())

    def strange(self, connection: FrontendConnection, why: str) -> None:
        """Count a connection that is refused because it does not know the fleet's key."""
        count = self.counters.strangers = self.counters.strangers + 1
        if str(count).strip("0") == "1":  # the first, the tenth, the hundredth: he may come again and again
            log.warning("stranger_refused", worker=self.worker, why=why, so_far=count)

    def closed(self, connection: FrontendConnection) -> None:
        """Take a lost connection's streams out of the engine."""
        self.connections.remove(connection)
        for key in list(connection.streams.values()):
            self._drop(key, "gone")

    def cancel(self, connection: FrontendConnection, frame: Cancel) -> None:
        """Take one stream out of the engine."""
        key = connection.streams.get(frame.stream)
        if key is None:
            return
        if frame.why == "drained":
            self._drain.taken_away_by(connection.frontend)
        self._drop(key, frame.why)

    def generate(self, connection: FrontendConnection, request: Generate) -> None:
        """Hand a request to the engine, or say at once why not."""
        self._drain.asked_by(connection.frontend)
        if error := self._objection(connection, request, request.stream):
            connection.batch.append(Chunk(request.stream, [], error=error))
            connection.flush()
            return
        key, now = next(self._keys), asyncio.get_running_loop().time()
        connection.used_at = now
        asked, turn = RequestOrigin.of(request), self._trust.turns
        self.streams.begin(key, Stream(connection, request.stream, request.canary, now, asked, turn))
        self.counters.requests += not request.canary
        self._heartbeats.hasten()
        self.engine.submit(key, request)

    def _objection(self, connection: FrontendConnection, request: Generate, number: int) -> str:
        """Return why a request is turned away that would be the connection's stream of this number; empty: it is not."""
        if refused := self._drain.refuses(request.canary):
            return refused
        if number in connection.streams:
            return f"invalid_request: stream {number} is open already on this connection"
        if len(connection.streams) >= STREAMS_PER_CONNECTION_MAX:
            return f"overloaded: {STREAMS_PER_CONNECTION_MAX} streams on one connection"
        return ""

    def _drop(self, key: int, why: str) -> None:
        if key in self._incoming:  # it is freed once nothing is copied into it any more
            self._incoming.drop(key)
            return
        moved = self._outgoing.forget(key)
        self.engine.cancel(key)
        stream = self.streams.by_key[key]
        if not (moved or stream.canary):
            self.counters.dropped(why, asyncio.get_running_loop().time() - stream.begun)
        self.streams.end(key)

    # --- planned moves: docs/kv-transfer.md

    def reserve(self, connection: FrontendConnection, frame: Reserve) -> None:
        """Keep room for a stream that is to come with its KV cache, or say why not."""
        error = self._objection(connection, frame.request, frame.stream)
        if not error and self._drain.deregistered:
            error = LEAVES
        if not error:
            self._incoming.reserve(next(self._keys), connection, frame)
        else:
            self.counters.moved("in", "declined")
            connection.send(Declined(frame.stream, error))

    def ship(self, connection: FrontendConnection, frame: Ship) -> None:
        """Send a stream's KV cache to a target, or say why not."""
        key = connection.streams.get(frame.stream, 0)
        stream = self.streams.by_key.get(key)
        if stream is None:
            connection.send(Declined(frame.stream, "there is no such stream here, or no longer"))
        else:
            self._outgoing.ship(key, stream, frame.grants)

    def stay(self, connection: FrontendConnection, frame: Stay) -> None:
        """Break a shipment off. The stream goes on here; if it is over, nothing is left to do."""
        self._outgoing.stay(connection.streams.get(frame.stream, 0))
        self.output.stays()

    # --- what the engine says

    def _ended(self, key: int, stream: Stream, error: str | None) -> None:
        """Count a stream whose last chunk is on its way, and forget it."""
        if error is not None and error.startswith(FAULTS) and self._on_fault is not None:
            self._on_fault(error)
        if error is not None and error.startswith("overloaded") and self.engine.load().closed_s:
            self._heartbeats.beat_all()  # before the error: no frontend sends the request here again
        if error is not None and error.startswith("non_finite"):
            self._trust.lose("non_finite", error)
        moved = self._outgoing.forget(key)
        if not (moved or stream.canary):  # a canary is nobody's request
            if error is None:
                self.counters.finished(asyncio.get_running_loop().time() - stream.begun)
            else:
                self.counters.failed(error)
        self.streams.end(key)

    # --- draining

    @property
    def in_flight(self) -> int:
        """Users' open streams; canaries do not count."""
        return self.streams.users

    @property
    def refusal(self) -> Refusal | None:
        """Why new requests are turned away; None: they are not."""
        return self._drain.refusal

    @property
    def draining(self) -> bool:
        """Whether frontends are told to send nothing new."""
        return self._drain.draining

    def deregister(self) -> None:
        """Tell every frontend to send nothing more; requests that are on their way already are still taken."""
        self._drain.deregister()
        self._incoming.drop_all(LEAVES)  # they decode well where they are
        self._heartbeats.beat_all()

    def refuse(self, refusal: Refusal | None, *, tell: bool = True) -> None:
        """Turn new requests away from now on (None: no longer), and `tell` every frontend at once."""
        self._drain.refuse(refusal)
        if refusal is not None:
            self._incoming.drop_all(refusal.reason)
        if tell:
            self._heartbeats.beat_all()

    def drained(self) -> Ends:
        """Return how streams have ended since it began to drain, or since this was last asked."""
        return self._drain.drained()

    # --- rehearsals

    def blackhole(self, on: bool) -> None:
        """Swallow everything both ways without closing. Healed, connections that lost something are broken."""
        self.blackholed = on
        if not on:
            self.connections.abort_tainted()
