"""The target's side of a planned move: reserves KV blocks, receives a KV cache, continues the stream.

    Reserve ──▶ reserved ── every shard has arrived ──▶ committing ──▶ decoding: a stream like any other
       │           │                                        │
       ▼           └── Cancel, deadline, cut, damaged ──────┴──▶ all freed; Declined, unless the frontend has gone
    Declined: no free blocks, …

For a move, the target reserves KV blocks in its engine, and memory in which each shard arrives. If any shard fails, all shards
and the engine's blocks are freed. Verified bytes are copied into the engine while further bytes arrive. So only the last blocks
remain to be copied after the source has stopped the stream.

The engine's blocks may be freed only when no copy into them is running. The tasks of this module are therefore never cancelled.
An aborted stream loses its memory reservations first, then its copies finish or fail, and then its blocks are freed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog
import xxhash

from events.errors import HoldfastError
from events.fleet_key import FleetKey
from events.wire import Committed, Declined, Reserve, Reserved
from workers.counters import WorkerCounters
from workers.engines.engine import MOVES_MAX, Engine, Import, MoveRefused
from workers.frontends import FrontendConnection, RequestOrigin, Stream, StreamTable
from workers.kv_transfer.ledger import ReservationPolicy
from workers.kv_transfer.messages import (
    Description,
    Grant,
    RegionTaken,
    TransferFailed,
    TransferRefused,
    Transport,
)
from workers.kv_transfer.receiver import NAME, ROOT, ArrivalProgress, Arrived, Receiver, Regions
from workers.migration.state import RequestMigrationState, difference, unpacked_state
from workers.migration.trust import Trust

CLOSE_S_MAX = 0.7
# for the engine to continue the stream at the end of its step; an engine that needs longer hangs
COMMIT_S_MAX = 10.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMoveSettings:
    """The settings with which one worker sends and receives KV caches."""

    host: str = "127.0.0.1"  # address to listen on
    advertise: str = ""  # address announced to sources; empty: the same as `host`
    root: Path = ROOT  # directory of the memory regions
    policy: ReservationPolicy | None = None  # limits of the receiver; None: its defaults
    piece_bytes: int = 16 << 20  # maximum number of bytes copied out of an engine at once, per shard
    take_bytes: int = 64 << 20  # maximum number of bytes copied into an engine at once, per shard
    key: FleetKey | None = None  # the fleet key, which source and target of a transfer must know
    # builds a transport besides shared memory and sockets, which may take seconds; None: no other transport
    transport: Callable[[], Transport] | None = None


@dataclass(eq=False)
class LazyReceiver:
    """Creates the receiver of one worker at the first reservation.

    Until then, the worker has no port, thread or file for KV transfers.
    """

    instance: str
    own: Callable[[], Sequence[Description]]  # returns the descriptions of the engine's shards
    settings: KvMoveSettings
    # returns the transport that sources may use if they have it too; None: only shared memory and sockets are used
    transport: Callable[[], Transport | None] = lambda: None
    receiver: Receiver | None = None  # None until the first stream arrives
    _closed: bool = False
    _build_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def grants(self, blocks: int, tokens: Sequence[int], first_block: int) -> list[Grant]:
        """Reserve memory for `blocks` KV blocks of each shard, starting at block `first_block` of the sequence.

        Return one grant for each shard. If the memory of one shard cannot be reserved, free the memory reserved for the others
        and raise MoveRefused. Raise MoveRefused also if the receiver is closed or cannot be created.
        """
        receiver = await self._get_receiver()
        return await asyncio.to_thread(self._reserve, receiver, blocks, tokens, first_block)

    def _reserve(
        self, receiver: Receiver, blocks: int, tokens: Sequence[int], first_block: int
    ) -> list[Grant]:
        made: list[Grant] = []
        for description in self.own():
            try:
                grant = receiver.reserve(description, blocks, tokens, first_block)
            except TransferFailed as error:
                for one in made:
                    receiver.abort(one.ticket, str(error))
                raise MoveRefused(str(error)) from error
            made.append(grant)
        return made

    async def _get_receiver(self) -> Receiver:
        async with self._build_lock:
            if self._closed:
                raise MoveRefused("this worker is shutting down")
            if self.receiver is None:
                self.receiver = await asyncio.to_thread(self._build_receiver)
            return self.receiver

    def _build_receiver(self) -> Receiver:
        name, settings = self.instance, self.settings
        if not NAME.fullmatch(name):
            name = xxhash.xxh3_128_hexdigest(name.encode())
        try:
            regions = Regions(name, settings.root)
        except (OSError, RegionTaken) as error:
            raise MoveRefused(f"cannot receive KV caches: {error}") from error
        try:
            return Receiver(
                tuple(self.own()),
                regions,
                settings.policy,
                settings.host,
                advertise=settings.advertise,
                transport=self.transport(),
                key=settings.key,
            )
        except OSError as error:
            regions.close()
            raise MoveRefused(f"cannot receive KV caches: {error}") from error

    def abort(self, grants: Sequence[Grant], why: str) -> None:
        """End the reservations of these grants, whatever their state, for the reason `why`."""
        if self.receiver is not None:
            for grant in grants:
                self.receiver.abort(grant.ticket, why)

    def release(self, grants: Sequence[Grant]) -> None:
        """Free the memory reserved by these grants, after the engine has copied the KV caches from this memory."""
        if self.receiver is not None:
            for grant in grants:
                self.receiver.release(grant.ticket)

    async def close(self) -> None:
        """Close the receiver with its connections, threads and files. Later reservations are refused."""
        self._closed = True
        async with self._build_lock:
            if self.receiver is not None:
                await asyncio.to_thread(self.receiver.close, CLOSE_S_MAX)


@dataclass(slots=True, eq=False)
class IncomingStream:
    """A stream that is arriving from another worker."""

    key: int
    room: Import  # the engine's reserved blocks
    room_tokens: int  # number of tokens for which blocks are reserved
    connection: FrontendConnection
    number: int  # the frontend's number for the stream
    asked: RequestOrigin
    known: list[int]  # the request's tokens at the time of the reservation
    grants: list[Grant] = field(default_factory=list)
    gone: bool = False  # whether the frontend has cancelled the move
    why: str = ""  # the reason why the move was aborted; empty if it was not


@dataclass(eq=False)
class IncomingMigrations:
    """Runs the moves of other workers' streams to one worker."""

    engine: Engine
    trust: Trust
    landing: LazyReceiver
    streams: StreamTable
    counters: WorkerCounters
    take_bytes: int  # maximum number of bytes copied into the engine at once, per shard
    incoming: dict[int, IncomingStream] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # one per stream

    def __len__(self) -> int:
        return len(self.incoming)

    def reserve(self, key: int, connection: FrontendConnection, frame: Reserve) -> IncomingStream | None:
        """Reserve KV blocks in the engine for the stream `key`. A later call of `arrive` receives the stream.

        If the reservation is refused, send the frontend the reason and return None.
        """
        asked = RequestOrigin.of(frame.request)
        room = self._room(key, frame)
        if isinstance(room, str):
            self.counters.moved("in", "declined")
            log.info("reserve_declined", request=asked.request, reason=room)
            connection.send(Declined(frame.stream, room))
            return None
        room_tokens = min(frame.room_tokens, self.engine.identity.context_tokens)
        incoming = IncomingStream(
            key, room, room_tokens, connection, frame.stream, asked, frame.request.tokens
        )
        self.incoming[key] = incoming
        connection.streams[frame.stream] = key
        return incoming

    def _room(self, key: int, frame: Reserve) -> Import | str:
        request = frame.request
        if not self.engine.kv:
            return "this engine cannot receive KV caches"
        if request.canary:
            return "canaries cannot move"
        if not 0 < request.prompt_tokens <= len(request.tokens) <= frame.room_tokens:
            return (
                f"invalid reservation: room for {frame.room_tokens} tokens, {len(request.tokens)} known tokens, "
                f"{request.prompt_tokens} prompt tokens"
            )
        if len(self.incoming) >= MOVES_MAX:
            return f"too many at once: {MOVES_MAX} streams are arriving"
        return self.engine.reserve(key, request, frame.room_tokens)

    def drop(self, key: int, why: str = "") -> None:
        """Abort the arriving stream `key`, and send `why` to its frontend.

        If `why` is empty, the frontend itself has cancelled the move, and nothing is sent.
        """
        if (incoming := self.incoming.get(key)) is not None:
            incoming.gone = incoming.gone or not why
            self._give_up(incoming, why or "the frontend cancelled the move")

    def drop_all(self, why: str) -> None:
        """Abort all arriving streams and send the reason to their frontends."""
        for key in list(self.incoming):
            self.drop(key, why)

    def _give_up(self, incoming: IncomingStream, why: str) -> None:
        """Free the memory reservations of an arriving stream, which makes its arrival fail.

        The memory is freed in a thread, because freeing gigabytes takes long.
        """
        incoming.why = incoming.why or why
        if incoming.grants:
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, self.landing.abort, incoming.grants, incoming.why)

    # --- how a stream arrives

    async def arrive(self, incoming: IncomingStream) -> bool:
        """Receive a stream that `reserve` returned and notify its frontend. Return whether the stream now decodes here."""
        try:
            await self._reserve(incoming)
            arrived = await self._arrive(incoming)
            await self._commit(incoming, arrived)
        except HoldfastError as error:
            self._end(incoming, incoming.why or str(error))
        except Exception as error:
            log.exception("move_in_broke")
            self._end(incoming, f"the engine failed: {error!r}")
        else:
            return True
        return False

    async def free(self, incoming: IncomingStream) -> None:
        """Free the memory in which a stream's KV cache arrived."""
        await asyncio.to_thread(self.landing.release, incoming.grants)

    def _end(self, incoming: IncomingStream, why: str) -> None:
        """Free all resources of a stream that failed to arrive, and send its frontend the reason."""
        self._give_up(incoming, why)
        self.engine.cancel(incoming.key)
        self._forget(incoming)
        self.counters.moved("in", "failed")
        log.warning("move_in_failed", request=incoming.asked.request, reason=why)
        if not incoming.gone:
            incoming.connection.send(Declined(incoming.number, why))

    def _forget(self, incoming: IncomingStream) -> None:
        self.incoming.pop(incoming.key, None)
        connection = incoming.connection
        if connection.streams.get(incoming.number) == incoming.key:
            del connection.streams[incoming.number]

    async def _reserve(self, incoming: IncomingStream) -> None:
        """Reserve memory for every shard, and send the grants to the frontend. Raise MoveRefused if this fails."""
        own, room = self.engine.kv[0], incoming.room
        first = room.cached_tokens // own.block_size
        blocks = max(1, own.blocks(incoming.room_tokens) - first)
        incoming.grants = await self.landing.grants(blocks, incoming.known, first)
        if incoming.why:  # aborted while the memory was reserved
            raise MoveRefused(incoming.why)
        grants = [msgspec.msgpack.encode(grant) for grant in incoming.grants]
        incoming.connection.send(Reserved(incoming.number, grants, room.cached_tokens))

    async def _arrive(self, incoming: IncomingStream) -> list[Arrived]:
        """Receive all shards concurrently and return them. If one fails, wait until all have ended, then raise MoveRefused."""
        shards = range(len(incoming.grants))
        received = await asyncio.gather(
            *(self._arrive_shard(incoming, shard) for shard in shards), return_exceptions=True
        )
        failed = next((one for one in received if isinstance(one, BaseException)), None)
        if failed is not None:
            try:
                raise failed
            finally:  # breaks the reference cycle of the error and its frames, which keeps the received memory alive
                del failed, received
        arrived = [one for one in received if isinstance(one, Arrived)]
        first = arrived[0]
        if any(
            (one.tokens, one.computed, one.state) != (first.tokens, first.computed, first.state)
            for one in arrived
        ):
            raise MoveRefused("the shards differ in their tokens or state")
        return arrived

    async def _arrive_shard(self, incoming: IncomingStream, shard: int) -> Arrived:
        receiver, grant = self.landing.receiver, incoming.grants[shard]
        assert receiver is not None
        try:
            return await _receive_shard(receiver, grant, shard, incoming.room, self.take_bytes)
        except BaseException as error:  # the other shards are no longer needed
            self._give_up(incoming, str(error))
            raise

    async def _commit(self, incoming: IncomingStream, arrived: list[Arrived]) -> None:
        """Let the engine continue the stream, and notify the frontend. The stream's output is sent after the notification."""
        received_at, first = time.monotonic(), arrived[0]
        state = _checked_state(incoming, first)
        bytes_, blocks = sum(len(one.memory) for one in arrived), self._blocks(arrived)
        begun = asyncio.get_running_loop().time()
        turn = self.trust.turns
        stream = Stream(incoming.connection, incoming.number, False, begun, incoming.asked, turn, held=[])
        self.streams.begin(incoming.key, stream)
        self.streams.first_output(stream)
        try:
            await _within(COMMIT_S_MAX, incoming.room.commit(first.tokens, first.computed))
            # aborted during the commit; the engine must cancel the stream, which already decodes
            if incoming.why:
                raise MoveRefused(incoming.why)
        except BaseException:
            self.streams.end(incoming.key)
            self.engine.cancel(incoming.key)
            raise
        self.incoming.pop(incoming.key)
        stopped_ms = state.stopped_ms + (time.monotonic() - received_at) * 1e3
        new_tokens = first.tokens[len(incoming.known) :]
        # for a shared region, only the source knows whether it used shared memory or a transport
        link = state.link or first.link if first.link == "shm" else first.link
        incoming.connection.send(
            Committed(incoming.number, new_tokens, bytes_, blocks, link, round(stopped_ms, 3))
        )
        self.counters.moved("in", "committed", bytes_, stopped_ms / 1e3)
        log.info("moved_in", request=incoming.asked.request, bytes=bytes_, link=link)

    def _blocks(self, arrived: list[Arrived]) -> int:
        return sum(len(a.memory) // own.block_bytes for a, own in zip(arrived, self.engine.kv, strict=True))

    async def close(self) -> None:
        """Abort all arriving streams, close the receiver, and wait until the streams' resources are freed."""
        self.drop_all("this worker is shutting down")
        await self.landing.close()
        if self.tasks:
            await asyncio.wait(self.tasks)


async def _within(seconds: float, commit: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await commit
    except TimeoutError:
        raise MoveRefused(f"the engine did not take the stream over within {seconds:g} s") from None


def _checked_state(incoming: IncomingStream, arrived: Arrived) -> RequestMigrationState:
    """Decode the state that arrived with a stream. Raise MoveRefused if it is invalid or belongs to another request."""
    try:
        state = unpacked_state(arrived.state)
    except ValueError as error:
        raise MoveRefused(str(error)) from error
    if differs := difference(state, incoming.asked, arrived.tokens, arrived.computed):
        raise MoveRefused(f"another request: {differs}")
    return state


async def _receive_shard(
    receiver: Receiver, grant: Grant, shard: int, room: Import, take_bytes: int
) -> Arrived:
    """Copy one shard's blocks into the engine as they arrive, and return the arrived shard.

    Raise MoveRefused if the transfer of the shard fails.
    """
    size = grant.description.block_bytes
    limit = max(1, take_bytes // size)
    arrival = asyncio.wrap_future(receiver.arrival(grant.ticket))
    more = ArrivalProgress()
    arrival.add_done_callback(more.settled)
    receiver.watch(grant.ticket, more)
    taken = 0

    async def take(memory: memoryview) -> int:
        end = min(len(memory) // size, taken + limit)
        if end > taken:
            await room.take(shard, grant.first_block + taken, memory[taken * size : end * size])
        return end

    while not arrival.done():
        more.clear()
        before, taken = taken, await take(receiver.received(grant.ticket))
        if taken == before:
            await more.wait()
    received = arrival.result()
    if isinstance(received, TransferRefused):
        raise MoveRefused(received.reason)
    while taken * size < len(received.memory):
        taken = await take(received.memory)
    return received
