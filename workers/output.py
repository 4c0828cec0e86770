"""Routes the output of a worker's engine to the frontends' streams, and moves streams between workers.

The engine uses keys, frontends use stream numbers. A `Stream` maps one to the other, and output for the key of an ended
stream is dropped here. Only `deliver` may be called from another thread than the loop's.
"""

import asyncio
import contextlib
import threading
from collections.abc import Sequence

import structlog

from events.journal.port import Journal
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
REPORT_EVERY_S = 10.0  # an engine that keeps raising causes one fact per interval, not one per request

log = structlog.get_logger(__name__)


def layout(shards: Sequence[Description]) -> KvLayout | None:
    """Return the KV cache layout that a worker with these shards registers; None: none of its cache can move."""
    if not shards:
        return None
    one, heads = shards[0], sum(shard.heads for shard in shards)
    # keys and values, in one block of one shard
    numbers = 2 * one.layers * one.heads * one.head_size * one.block_size
    return KvLayout(
        layers=one.layers,
        kv_heads=heads,
        head_size=one.head_size,
        element_bytes=max(1, round(one.block_bytes / numbers)),
    )


class WorkerMigrations:
    """The planned moves of one worker: its trust, outgoing and incoming streams, and their transport."""

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
        """Whether streams can leave with their KV cache."""
        return bool(self._engine.kv)

    async def start(self) -> None:
        """Load the configured transport, if any. It takes seconds, so it is loaded before the first move."""
        if self._make_transport is not None:
            self._transport = await asyncio.to_thread(self._make_transport)

    async def close(self) -> None:
        """End all moves and free their threads, connections and files."""
        self.source.close()
        with contextlib.suppress(TimeoutError):  # the rest ends with the process
            async with asyncio.timeout(CLOSE_S_MAX):
                await self.target.close()


class FaultReport:
    """Records engine errors that end a stream, as facts and log lines: at most one in 10 s."""

    def __init__(self, journal: Journal, worker: str, instance: str) -> None:
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


class StreamOutput:
    """Sends one worker's output to the frontends, and ends each stream that the engine ends."""

    def __init__(
        self,
        engine: Engine,
        streams: StreamTable,
        connections: FrontendConnections,
        heartbeats: Heartbeats,
        counters: WorkerCounters,
        moves: WorkerMigrations,
        faults: FaultReport | None,
    ) -> None:
        """`faults` records each engine error that ends a stream."""
        self._engine = engine
        self._streams = streams
        self._connections = connections
        self._heartbeats = heartbeats
        self._counters = counters
        self._outgoing, self._incoming, self._trust = moves.source, moves.target, moves.trust
        self._faults = faults
        self._sending_on = ""  # why decoding streams are sent to other workers; "": they are not
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    def start(self) -> None:
        """Deliver on the running loop, in this thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def deliver(self, out: list[tuple[int, Chunk]]) -> None:
        """Accept one step's output, from any thread, and send each frontend its part as one frame."""
        if threading.get_ident() == self._thread:
            self._deliver(out)
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, out)

    def _deliver(self, out: list[tuple[int, Chunk]]) -> None:
        streams, tokens, prefilled = self._streams.by_key, 0, False
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
            if not stream.decodes and (chunk.tokens or chunk.text):
                self._streams.first_output(stream)
                prefilled = True
            if chunk.finish is not None or chunk.error is not None:
                self._end(key, stream, chunk.error)
        self._counters.tokens += tokens
        if prefilled and self._sending_on:
            self._send_on()
        for connection in self._connections.open:
            if connection.batch:
                connection.flush()

    def _end(self, key: int, stream: Stream, error: str | None) -> None:
        """Count a stream that has ended and drop it. Its last chunk is already in the batch."""
        if error is not None:
            self._react(error)
        moved = stream.leaving and self._outgoing.forget(key)
        if not (moved or stream.canary):  # a canary is not a user's request
            if error is None:
                self._counters.finished(asyncio.get_running_loop().time() - stream.begun)
            else:
                self._counters.failed(error)
        self._streams.end(key)

    def _react(self, error: str) -> None:
        """React to a stream's error beyond ending the stream: record it, send a beat, or withdraw trust."""
        if error.startswith(FAULTS) and self._faults is not None:
            self._faults.report(error)
        if error.startswith("overloaded") and self._engine.load().closed_s:
            self._heartbeats.beat_all()  # before the error, so that no frontend sends the request here again
        if error.startswith("non_finite"):
            self.distrust("non_finite", error)

    def drop(self, key: int, why: str) -> None:
        """Remove a stream from the engine that its frontend no longer reads."""
        if key in self._incoming:  # it is freed once nothing is being copied into it
            self._incoming.drop(key)
            return
        moved = self._outgoing.forget(key)
        self._engine.cancel(key)
        stream = self._streams.by_key[key]
        if not (moved or stream.canary):
            self._counters.dropped(why, asyncio.get_running_loop().time() - stream.begun)
        self._streams.end(key)

    # --- streams that arrive with their KV cache

    def take_in(self, key: int, connection: FrontendConnection, frame: Reserve) -> None:
        """Reserve room for a stream, and continue it once its KV cache has arrived; or answer with the reason for a refusal."""
        if (incoming := self._incoming.reserve(key, connection, frame)) is not None:
            task = asyncio.ensure_future(self._take_in(incoming))
            self._incoming.tasks.add(task)
            task.add_done_callback(self._incoming.tasks.discard)

    async def _take_in(self, incoming: IncomingStream) -> None:
        if await self._incoming.arrive(incoming):
            self._counters.requests += 1
            stream = self._streams.by_key[incoming.key]
            held, stream.held = stream.held, None
            self._deliver(held or [])
            await self._incoming.free(incoming)

    # --- streams that leave

    def ship(self, key: int, stream: Stream, grants: Sequence[bytes]) -> None:
        """Ship a stream's KV cache to the target that issued these grants, or answer why not."""
        if (leaving := self._outgoing.begin(key, stream, grants)) is not None:
            leaving.task = asyncio.ensure_future(self._ship(leaving))

    async def _ship(self, leaving: OutgoingStream) -> None:
        if await self._outgoing.ship(leaving):
            self.stays()

    def distrust(self, cause: str, reason: str) -> None:
        """Stop trusting this worker's results: nothing is shipped any more, and streams being shipped stay here."""
        if self._trust.lose(cause, reason):
            for leaving in self._outgoing.under_way():
                if self._outgoing.decline(leaving, reason):
                    self.stays()

    def regain(self, cause: str) -> None:
        """Withdraw a cause of distrust: what is computed from now on may be shipped."""
        self._trust.regain(cause)

    def end_all(self, error: str) -> None:
        """End every stream with an error. New requests are already refused, and incoming streams have been dropped."""
        keys = list(self._streams.by_key)
        for key in keys:
            self._engine.cancel(key)
        self._deliver([(key, Chunk(0, [], error=error)) for key in keys])

    def send_elsewhere(self, error: str) -> None:
        """End every decoding user stream with an error, and from now on each stream as soon as its prefill is over.

        Streams that are moving to another worker with their KV cache continue.
        """
        self._sending_on = error
        self._send_on()
        self._connections.flush()

    def stays(self) -> None:
        """After a failed move, send the stream to another worker if all streams are being sent away."""
        if self._sending_on:
            self.send_elsewhere(self._sending_on)

    def _send_on(self) -> None:
        for key, stream in list(self._streams.by_key.items()):
            if not stream.decodes or stream.canary or stream.held is not None or stream.leaving:
                continue
            self._engine.cancel(key)
            connection = stream.connection
            connection.batch.append(Chunk(stream.number, [], error=self._sending_on))
            self._end(key, stream, self._sending_on)
