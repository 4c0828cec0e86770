"""The worker's request plane server, which serves the streams of many frontends from one engine.

`FrontendProtocol` reads frames, `WorkerServer` handles the frames, and `StreamOutput` sends the engine's output. All methods
run on one event loop, except `deliver`, which may be called from another thread.
"""

import asyncio
import contextlib
import itertools

import msgspec
import structlog

from events import wire
from events.fleet_key import FleetKey, UnknownPeer, WorkerHandshake
from events.nats.channels import ChannelListener, Channels
from events.wire import Cancel, Chunk, Declined, Generate, Hello, Proof, Reserve, Ship, Stay, Welcome
from workers.counters import DrainState, Refusal, WorkerCounters
from workers.engines.engine import Engine
from workers.frontends import (
    BufferLimits,
    FrontendConnection,
    FrontendConnections,
    FrontendLimits,
    Heartbeats,
    RequestOrigin,
    Stream,
    StreamTable,
)
from workers.listen_socket import BACKLOG, listening
from workers.migration.target import KvMoveSettings
from workers.output import FaultReport, StreamOutput, WorkerMigrations

STREAMS_PER_CONNECTION_MAX = 4096
HELLO_BYTES_MAX = 4096  # maximum size of a frame on a connection that has sent no hello
LEAVES = "engine_shutdown: this worker is leaving"

log = structlog.get_logger(__name__)


class FrontendProtocol(asyncio.Protocol):
    """The receiving side of one frontend's connection, which decodes frames and passes them to the server."""

    def __init__(self, server: "WorkerServer") -> None:
        self.connection: FrontendConnection | None = None  # None until connected
        self._server = server
        self._handshake = WorkerHandshake(server.connections.key)
        self._splitter = wire.Splitter(HELLO_BYTES_MAX)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connection = FrontendConnection(transport, self._server.patience)
        self._server.connections.add(self.connection)

    def data_received(self, data: bytes) -> None:
        connection = self.connection
        assert connection is not None
        if connection.blackholed:
            connection.tainted = True
            return
        try:
            for body in self._splitter.feed(data):
                self._handle(connection, wire.to_worker.decode(body))
        except (wire.BadFrame, msgspec.MsgspecError) as error:
            log.warning("bad_frame", frontend=connection.frontend, error=str(error))
            connection.abort()
        except UnknownPeer as error:
            self._server.strange(str(error))
            connection.abort()

    def eof_received(self) -> bool:
        return False  # the frontend has closed: let the transport close

    def pause_writing(self) -> None:
        if self.connection is not None:
            self.connection.pause()

    def resume_writing(self) -> None:
        if self.connection is not None:
            self.connection.resume()

    def connection_lost(self, error: Exception | None) -> None:
        if self.connection is not None:
            self.connection.lost()
            self._server.closed(self.connection)

    def _handle(self, connection: FrontendConnection, frame: wire.ToWorker) -> None:
        match frame:
            case Generate() if connection.frontend:
                self._server.generate(connection, frame)
            case Cancel() if connection.frontend:
                self._server.cancel(connection, frame)
            case Reserve() if connection.frontend:
                self._server.reserve(connection, frame)
            case Ship() if connection.frontend:
                self._server.ship(connection, frame)
            case Stay() if connection.frontend:
                self._server.stay(connection, frame)
            case Hello() if not connection.frontend and frame.version == wire.VERSION:
                challenge = self._handshake.challenge(frame)
                if challenge is None:
                    self._welcome(connection, frame)
                else:
                    connection.send(challenge)
            case Proof() if not connection.frontend:
                self._welcome(connection, self._handshake.proven(frame))
            case Hello():
                raise wire.BadFrame(
                    f"hello of version {frame.version}; this worker supports version {wire.VERSION}, and one hello per connection"
                )
            case _:
                raise wire.BadFrame("a frame before hello")

    def _welcome(self, connection: FrontendConnection, hello: Hello) -> None:
        connection.frontend = hello.frontend or "unnamed"
        self._splitter.frame_bytes_max = wire.FRAME_BYTES_MAX
        self._server.greeted(connection)


class WorkerServer:
    """Serves one engine to frontends. Frontends connect to a port or through the broker."""

    def __init__(
        self,
        *,
        worker: str,
        instance: str,
        engine: Engine,
        patience: BufferLimits | None = None,
        kv_moves: KvMoveSettings | None = None,
        faults: FaultReport | None = None,
        key: FleetKey | None = None,
        limits: FrontendLimits | None = None,
    ) -> None:
        """Build a server, which listens after `start` or `start_behind`.

        `patience` limits what is buffered for a slow frontend, and `limits` limits the number of connections. `kv_moves` holds
        the settings of moves with KV caches. `faults` records engine errors that end streams. `key` is the fleet key, and
        frontends must prove that they know it. With None, any frontend may connect.
        """
        self.worker, self.instance = worker, instance
        self.patience = patience or BufferLimits()
        self.address = ("", 0)
        self.counters = WorkerCounters()
        self.connections = FrontendConnections(worker, self.counters, limits or FrontendLimits(), key)
        self.engine = engine
        self.drain = DrainState(self.counters)
        self._heartbeats = Heartbeats(engine, self.connections, self.drain)
        self.streams = StreamTable(self._heartbeats)
        self.moves = WorkerMigrations(engine, instance, self.streams, self.counters, kv_moves)
        self.output = StreamOutput(
            engine, self.streams, self.connections, self._heartbeats, self.counters, self.moves, faults
        )
        self.deliver = self.output.deliver  # called by the engine with each step's output
        self._outgoing, self._incoming = self.moves.source, self.moves.target
        self._keys = itertools.count(1)
        self._listener: asyncio.Server | ChannelListener | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen on a TCP port, and return the address as host and port. Raise OSError if the port cannot be bound."""
        sock = listening(host, port)
        self._begin()
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: FrontendProtocol(self), sock=sock, backlog=BACKLOG
        )
        self.address = sock.getsockname()[:2]
        return self.address

    async def start_behind(self, channels: Channels, subject: str) -> None:
        """Accept frontends that connect through the broker on `subject`."""
        self._begin()
        self._listener = await channels.listen(subject, lambda: FrontendProtocol(self))

    def _begin(self) -> None:
        self.output.start()
        self._heartbeats.start()

    async def close(self, deadline_s: float = 1.0) -> None:
        """Stop listening, send buffered output, and close all connections.

        Connections that have not closed after `deadline_s` seconds are aborted.
        """
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
        """Abort every connection at once; buffered output is lost."""
        if self._listener is not None:
            self._listener.close()
        self.connections.abort()

    # --- frames of frontends

    def greeted(self, connection: FrontendConnection) -> None:
        """Answer a frontend's hello with a welcome and a heartbeat, unless a connection limit closes this connection."""
        connection.used_at = asyncio.get_running_loop().time()
        self.connections.greeted(connection)
        if connection not in self.connections.open:
            return  # beyond a limit: aborted
        # `alike` is False for an engine that is not exact, which sends text to users and tokens to canaries
        identity = self.engine.identity
        connection.send(Welcome(self.worker, self.instance, identity.model, alike=identity.exact))
        connection.beaten_at = connection.opened_at
        connection.send(self._heartbeats.beat())

    def strange(self, why: str) -> None:
        """Count a connection that is refused because its client does not know the fleet's key. `why` is for the log."""
        count = self.counters.strangers = self.counters.strangers + 1
        # log only the first, the tenth, the hundredth ..., because a scanner may open many connections
        if str(count).strip("0") == "1":
            log.warning("stranger_refused", worker=self.worker, why=why, so_far=count)

    def closed(self, connection: FrontendConnection) -> None:
        """Remove a lost connection, and cancel the connection's streams in the engine."""
        self.connections.remove(connection)
        for key in list(connection.streams.values()):
            self.output.drop(key, "gone")

    def cancel(self, connection: FrontendConnection, frame: Cancel) -> None:
        """Cancel a stream that its frontend no longer reads. A stream that has already ended is ignored."""
        key = connection.streams.get(frame.stream)
        if key is None:
            return
        if frame.why == "drained":
            self.drain.taken_away_by(connection.frontend)
        self.output.drop(key, frame.why)

    def generate(self, connection: FrontendConnection, request: Generate) -> None:
        """Submit a request to the engine, or send the frontend an error if the request is refused."""
        self.drain.note_request(connection.frontend)
        if error := self._refusal_reason(connection, request, request.stream):
            connection.batch.append(Chunk(request.stream, [], error=error))
            connection.flush()
            return
        key, now = next(self._keys), asyncio.get_running_loop().time()
        connection.used_at = now
        origin, turn = RequestOrigin.of(request), self.moves.trust.turns
        stream = Stream(connection, request.stream, request.canary, now, origin, turn)
        stream.proxied = request.proxied is not None
        self.streams.begin(key, stream)
        self.counters.requests += not request.canary
        self.engine.submit(key, request)

    def _refusal_reason(self, connection: FrontendConnection, request: Generate, number: int) -> str:
        """Return the reason why a request for stream `number` of this connection is refused; empty if it is accepted."""
        if refused := self.drain.refuses(request.canary):
            return refused
        if number in connection.streams:
            return f"invalid_request: stream {number} is already open on this connection"
        if len(connection.streams) >= STREAMS_PER_CONNECTION_MAX:
            return f"overloaded: {STREAMS_PER_CONNECTION_MAX} streams on one connection"
        return ""

    # --- planned moves: docs/concepts/kv-transfer.md

    def reserve(self, connection: FrontendConnection, frame: Reserve) -> None:
        """Reserve KV blocks for a stream that will arrive with its KV cache, or send the frontend the reason for a refusal."""
        error = self._refusal_reason(connection, frame.request, frame.stream)
        if not error and self.drain.deregistered:
            error = LEAVES
        if not error:
            self.output.receive_stream(next(self._keys), connection, frame)
        else:
            self.counters.moved("in", "declined")
            connection.send(Declined(frame.stream, error))

    def ship(self, connection: FrontendConnection, frame: Ship) -> None:
        """Ship a stream's KV cache to the worker that issued the grants, or send the frontend the reason for a refusal."""
        key = connection.streams.get(frame.stream, 0)
        stream = self.streams.by_key.get(key)
        if stream is None:
            connection.send(Declined(frame.stream, "this stream does not exist here, or has ended"))
        else:
            self.output.ship(key, stream, frame.grants)

    def stay(self, connection: FrontendConnection, frame: Stay) -> None:
        """Abort the shipment of a stream, so that the stream continues on this worker. A stream that has ended is ignored."""
        self._outgoing.stay(connection.streams.get(frame.stream, 0))
        self.output.stays()

    # --- draining

    @property
    def in_flight(self) -> int:
        """Number of users' open streams, without canaries."""
        return self.streams.users

    def deregister(self) -> None:
        """Notify every frontend to send no new requests. Requests already in transit are still accepted."""
        self.drain.deregister()
        self._incoming.drop_all(LEAVES)  # streams that have not arrived yet continue on their source workers
        self._heartbeats.beat_all()

    def refuse(self, refusal: Refusal | None, *, tell: bool = True) -> None:
        """Refuse new requests for the reason `refusal`, or accept them again if `refusal` is None.

        If `tell` is true, every frontend is notified at once.
        """
        self.drain.refuse(refusal)
        if refusal is not None:
            self._incoming.drop_all(refusal.reason)
        if tell:
            self._heartbeats.beat_all()
