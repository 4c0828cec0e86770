"""Routes the output of a worker's engine to the frontends' streams, and moves streams between workers.

The engine identifies a stream by a key, and a frontend by a stream number on its connection. A `Stream` maps the key to the
number. Output for the key of an ended stream is dropped. Only `deliver` may be called outside the event loop's thread.
"""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from events.journal.port import JournalReports
from events.observations import EngineFaulted, KvLayout
from events.wire import Chunk, Reserve, without_quotes
from workers.counters import WorkerCounters
from workers.engines.engine import Engine
from workers.frontends import FrontendConnection, FrontendConnections, Heartbeats, Stream, StreamTable
from workers.kv_transfer.messages import Description, Transport
from workers.migration.source import OutgoingMigrations, OutgoingStream
from workers.migration.target import IncomingMigrations, IncomingStream, KvMoveSettings, LazyReceiver
from workers.migration.trust import Trust

CLOSE_S_MAX = 0.9
FAULTS = ("engine_error", "non_finite", "stream_incomplete")  # errors caused by the engine itself
REPORT_EVERY_S = 10.0  # an engine that fails every request causes one fact per interval, not one per request

log = structlog.get_logger(__name__)


def layout(shards: Sequence[Description]) -> KvLayout | None:
    """Return the KV cache layout that a worker with these shards registers; None if `shards` is empty.

    A worker that registers no layout cannot move streams with their KV cache.
    """
    if not shards:
        return None
    one, heads = shards[0], sum(shard.heads for shard in shards)
    # elements of keys and values in one block of one shard
    numbers = 2 * one.layers * one.heads * one.head_size * one.block_size
    return KvLayout(
        layers=one.layers,
        kv_heads=heads,
        head_size=one.head_size,
        element_bytes=max(1, round(one.block_bytes / numbers)),
    )


class WorkerMigrations:
    """Holds the parts of one worker that move streams with their KV cache.

    The parts are the trust in the worker's results, the outgoing and incoming streams, and the KV transport.
    """

    def __init__(
        self,
        engine: Engine,
        instance: str,
        streams: StreamTable,
        counters: WorkerCounters,
        settings: KvMoveSettings | None = None,
    ) -> None:
        settings = settings or KvMoveSettings()
        self._make_transport = settings.transport
        self._transport: Transport | None = None
        self.trust = Trust(lambda: self._transport, settings.key)
        self.landing = LazyReceiver(instance, lambda: engine.kv, settings, lambda: self._transport)
        self.source = OutgoingMigrations(engine, self.trust, counters, settings.piece_bytes)
        self.target = IncomingMigrations(
            engine, self.trust, self.landing, streams, counters, settings.take_bytes
        )
        self._engine = engine

    @property
    def possible(self) -> bool:
        """Whether this worker's engine can ship the KV cache of a stream."""
        return bool(self._engine.kv)

    async def start(self) -> None:
        """Load the configured KV transport, if any. Loading takes seconds and must be over before the first move."""
        if self._make_transport is not None:
            self._transport = await asyncio.to_thread(self._make_transport)

    async def close(self) -> None:
        """End all moves and free their threads, connections and files."""
        self.source.close()
        with contextlib.suppress(TimeoutError):  # threads that are still open end with the process
            async with asyncio.timeout(CLOSE_S_MAX):
                await self.target.close()


class FaultReport:
    """Records engine errors that end a stream, as facts and log lines. At most one error in 10 s is recorded."""

    def __init__(self, journal: JournalReports, worker: str, instance: str) -> None:
        self._journal = journal
        self._worker, self._instance = worker, instance
        self._at = float("-inf")  # loop time of the newest report

    def report(self, reason: str) -> None:
        """Record an engine error, unless another was recorded within the last 10 s."""
        now = asyncio.get_running_loop().time()
        if now - self._at < REPORT_EVERY_S:
            return
        self._at = now
        reason = without_quotes(reason)
        log.error("engine_faulted", worker=self._worker, instance=self._instance, reason=reason)
        self._journal.observe(
            EngineFaulted(worker=self._worker, instance=self._instance, reason=reason, fatal=False)
        )


@dataclass(eq=False)
class StreamOutput:
    """Sends one worker's output to the frontends, and ends each stream that the engine ends."""

    engine: Engine
    streams: StreamTable
    connections: FrontendConnections
    heartbeats: Heartbeats
    counters: WorkerCounters
    moves: WorkerMigrations
    faults: FaultReport | None  # records each engine error that ends a stream
    _sending_on: str = ""  # why decoding streams are sent to other workers; empty while they stay
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: int = 0

    def __post_init__(self) -> None:
        self._outgoing, self._incoming, self._trust = self.moves.source, self.moves.target, self.moves.trust

    def start(self) -> None:
        """From now on, deliver output on the running event loop, which must run in the calling thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def deliver(self, out: list[tuple[int, Chunk]]) -> None:
        """Send each frontend its chunks of one engine step as one frame. May be called from any thread.

        `out` holds pairs of a stream's key in the engine and a chunk of the stream.
        """
        if threading.get_ident() == self._thread:
            self._deliver(out)
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, out)

    def _deliver(self, out: list[tuple[int, Chunk]]) -> None:
        streams, tokens, prefilled = self.streams.by_key, 0, False
        for key, chunk in out:
            stream = streams.get(key)
            if stream is None:
                continue
            if stream.held is not None:
                stream.held.append((key, chunk))
                continue
            chunk.stream = stream.number
            connection = stream.connection
            connection.batch.append(chunk)
            tokens += len(chunk.tokens)
            if not stream.decodes and (chunk.tokens or chunk.text or chunk.proxied is not None):
                self.streams.first_output(stream)
                prefilled = True
            if chunk.finish is not None or chunk.error is not None:
                self._end(key, stream, chunk.error)
        self.counters.tokens += tokens
        if prefilled and self._sending_on:
            self._send_on()
        self.connections.flush()

    def _end(self, key: int, stream: Stream, error: str | None) -> None:
        """Count a stream that has ended and remove it. Its last chunk must already be queued for its frontend."""
        if error is not None:
            self._react(error)
        moved = stream.leaving and self._outgoing.forget(key)
        if not (moved or stream.canary):  # a canary is not a user's request
            if error is None:
                self.counters.finished(asyncio.get_running_loop().time() - stream.begun)
            else:
                self.counters.failed(error)
        self.streams.end(key)

    def _react(self, error: str) -> None:
        """Let the worker react to an error that ended a stream.

        Depending on the error, record a fault, send a heartbeat to all frontends, or stop trusting the worker's results.
        """
        if error.startswith(FAULTS) and self.faults is not None:
            self.faults.report(error)
        if error.startswith("overloaded") and self.engine.load().closed_s:
            self.heartbeats.beat_all()  # sent before the error, so that no frontend retries the request on this worker
        if error.startswith("non_finite"):
            self.distrust("non_finite", error)

    def drop(self, key: int, why: str) -> None:
        """Remove the stream `key`, which its frontend no longer reads. The stream is counted by the reason `why`."""
        if key in self._incoming.incoming:  # its KV blocks are freed once no copy into them is running
            self._incoming.drop(key)
            return
        moved = self._outgoing.forget(key)
        self.engine.cancel(key)
        stream = self.streams.by_key[key]
        if not (moved or stream.canary):
            self.counters.dropped(why, asyncio.get_running_loop().time() - stream.begun)
        self.streams.end(key)

    # --- streams that arrive with their KV cache

    def receive_stream(self, key: int, connection: FrontendConnection, frame: Reserve) -> None:
        """Reserve KV blocks for a stream, and continue the stream once its KV cache has arrived.

        If the reservation is refused, answer the frontend with the reason.
        """
        if (incoming := self._incoming.reserve(key, connection, frame)) is not None:
            task = asyncio.ensure_future(self._take_in(incoming))
            self._incoming.tasks.add(task)
            task.add_done_callback(self._incoming.tasks.discard)

    async def _take_in(self, incoming: IncomingStream) -> None:
        if await self._incoming.arrive(incoming):
            self.counters.requests += 1
            stream = self.streams.by_key[incoming.key]
            held, stream.held = stream.held, None
            self._deliver(held or [])
            await self._incoming.free(incoming)

    # --- streams that leave

    def ship(self, key: int, stream: Stream, grants: Sequence[bytes]) -> None:
        """Ship a stream's KV cache to the worker that issued `grants`, or answer the frontend with the reason for a refusal."""
        if (leaving := self._outgoing.begin(key, stream, grants)) is not None:
            leaving.task = asyncio.ensure_future(self._ship(leaving))

    async def _ship(self, leaving: OutgoingStream) -> None:
        if await self._outgoing.ship(leaving):
            self.stays()

    def distrust(self, cause: str, reason: str) -> None:
        """Stop trusting this worker's results because of `cause`.

        While a cause of distrust remains, no KV cache is shipped. Shipments under way are declined, and their streams continue
        on this worker.
        """
        if self._trust.lose(cause, reason):
            for leaving in self._outgoing.under_way():
                if self._outgoing.decline(leaving, reason):
                    self.stays()

    def regain(self, cause: str) -> None:
        """Withdraw a cause of distrust. KV caches that are computed while no cause remains may be shipped."""
        self._trust.regain(cause)

    def end_all(self, error: str) -> None:
        """End every stream with `error`. The caller must first refuse new requests and drop the incoming streams."""
        keys = list(self.streams.by_key)
        for key in keys:
            self.engine.cancel(key)
        self._deliver([(key, Chunk(0, [], error=error)) for key in keys])

    def send_elsewhere(self, error: str) -> None:
        """End users' streams with `error`: each decoding stream now, and each other stream as soon as its prefill is over.

        The error makes the frontend continue the stream on another worker. Streams that are moving to another worker with their
        KV cache are left alone, and so are proxied streams, which no other worker can continue.
        """
        self._sending_on = error
        self._send_on()
        self.connections.flush()

    def stays(self) -> None:
        """Handle a move that failed, so that the stream stayed on this worker.

        If `send_elsewhere` was called before, end this stream too, so that its frontend continues it on another worker.
        """
        if self._sending_on:
            self.send_elsewhere(self._sending_on)

    def _send_on(self) -> None:
        for key, stream in list(self.streams.by_key.items()):
            if (
                not stream.decodes
                or stream.canary
                or stream.held is not None
                or stream.leaving
                or stream.proxied
            ):
                continue
            self.engine.cancel(key)
            connection = stream.connection
            connection.batch.append(Chunk(stream.number, [], error=self._sending_on))
            self._end(key, stream, self._sending_on)
