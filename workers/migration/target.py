"""The target's side of a planned move: keeps room for a stream, takes its KV cache in, and goes on with it.

    Reserve ──▶ reserved ── every shard has arrived ──▶ committing ──▶ decoding: a stream like any other
       │           │                                        │
       ▼           └── Cancel, deadline, cut, damaged ──────┴──▶ all freed; Declined, unless the frontend has gone
    Declined: no room, …

All or nothing: every shard arrives, or all shards and the engine's room are freed. What is verified is copied into the
engine while the rest still comes, so that after the source has stopped only its tail is left to do.

What a reader would get wrong: the engine's room may be freed only when no copy into it runs any more. So nothing here
is cancelled: a stream that is given up loses its reservations, its copies come to their end, and then it goes.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
import xxhash

from events.errors import HoldfastError
from events.wire import Committed, Declined, Reserve, Reserved
from workers.counters import WorkerCounters
from workers.engines.engine import MOVES_MAX, Engine, Import, MoveRefused
from workers.frontends import FrontendConnection, RequestOrigin, Stream, StreamTable
from workers.kv_transfer.messages import Description, Grant, RegionTaken, TransferRefused
from workers.kv_transfer.receiver import NAME, ArrivalProgress, Arrived, Receiver, Regions
from workers.kv_transfer.transport import Transport
from workers.migration.settings import KvMoveSettings
from workers.migration.state import RequestMigrationState, difference, unpacked_state
from workers.migration.trust import Trust

CLOSE_S_MAX = 0.7
COMMIT_S_MAX = 10.0  # the engine is between two steps before; longer is a hang

log = structlog.get_logger(__name__)


class Landing:
    """The receiver of one worker, or none yet. A worker that takes nothing in has no port, thread or file for it."""

    def __init__(
        self,
        instance: str,
        own: Callable[[], Sequence[Description]],
        settings: KvMoveSettings | None = None,
        transport: Callable[[], Transport | None] = lambda: None,
    ) -> None:
        """Receive for this instance, whose shards `own` describes. `transport`: by which sources may send that have it too,
        besides shared memory and sockets; asked when the first one comes."""
        self.receiver: Receiver | None = None
        self._instance = instance
        self._own = own
        self._settings = settings or KvMoveSettings()
        self._transport = transport
        self._closed = False
        self._making = asyncio.Lock()

    async def grants(self, blocks: int, tokens: Sequence[int], first_block: int) -> list[Grant]:
        """Reserve so many blocks for each shard, all or none. Raise MoveRefused."""
        receiver = await self._made()
        made = await asyncio.to_thread(self._reserve, receiver, blocks, tokens, first_block)
        if isinstance(made, TransferRefused):
            raise MoveRefused(made.reason)
        return made

    def _reserve(
        self, receiver: Receiver, blocks: int, tokens: Sequence[int], first_block: int
    ) -> list[Grant] | TransferRefused:
        made: list[Grant] = []
        for description in self._own():
            grant = receiver.reserve(description, blocks, tokens, first_block)
            if isinstance(grant, TransferRefused):
                for one in made:
                    receiver.abort(one.ticket, grant.reason)
                return grant
            made.append(grant)
        return made

    async def _made(self) -> Receiver:
        async with self._making:
            if self._closed:
                raise MoveRefused("this worker is shutting down")
            if self.receiver is None:
                self.receiver = await asyncio.to_thread(self._make)
            return self.receiver

    def _make(self) -> Receiver:
        name, settings = self._instance, self._settings
        if not NAME.fullmatch(name):
            name = xxhash.xxh3_128_hexdigest(name.encode())
        try:
            regions = Regions(name, settings.root)
        except (OSError, RegionTaken) as error:
            raise MoveRefused(f"no KV cache can be received: {error}") from error
        try:
            return Receiver(
                tuple(self._own()),
                regions,
                settings.policy,
                settings.host,
                advertise=settings.advertise,
                transport=self._transport(),
                key=settings.key,
            )
        except OSError as error:
            regions.close()
            raise MoveRefused(f"no KV cache can be received: {error}") from error

    def abort(self, grants: Sequence[Grant], why: str) -> None:
        """End reservations, in whatever state they are."""
        if self.receiver is not None:
            for grant in grants:
                self.receiver.abort(grant.ticket, why)

    def release(self, grants: Sequence[Grant]) -> None:
        """Free what has arrived and was copied."""
        if self.receiver is not None:
            for grant in grants:
                self.receiver.release(grant.ticket)

    async def close(self) -> None:
        """Free everything: connections, threads, and files."""
        self._closed = True
        async with self._making:
            if self.receiver is not None:
                await asyncio.to_thread(self.receiver.close, CLOSE_S_MAX)


@dataclass(slots=True, eq=False)
class IncomingStream:
    """A stream that is to come."""

    key: int
    room: Import
    room_tokens: int
    connection: FrontendConnection
    number: int  # of the stream, by which its frontend knows it
    asked: RequestOrigin
    known: list[int]  # its tokens so far
    grants: list[Grant] = field(default_factory=list)
    gone: bool = False  # its frontend has given it up
    why: str = ""  # it was given up


class IncomingMigrations:
    """All streams of one worker that are on their way in."""

    def __init__(
        self,
        engine: Engine,
        trust: Trust,
        landing: Landing,
        streams: StreamTable,
        counters: WorkerCounters,
        take_bytes: int,
    ) -> None:
        """`take_bytes` are copied into the engine at once, for each shard."""
        self._engine = engine
        self._trust = trust
        self._landing = landing
        self._streams = streams
        self._counters = counters
        self._take_bytes = take_bytes
        self._incoming: dict[int, IncomingStream] = {}
        self.tasks: set[asyncio.Task[None]] = set()  # one for each stream

    def __len__(self) -> int:
        return len(self._incoming)

    def __contains__(self, key: int) -> bool:
        return key in self._incoming

    @property
    def awaited(self) -> int:
        """How many of them have not been given up."""
        return sum(not incoming.why for incoming in self._incoming.values())

    def reserve(self, key: int, connection: FrontendConnection, frame: Reserve) -> IncomingStream | None:
        """Keep room for a stream under this key of the engine's, for `arrive`; None once its frontend is told why not."""
        asked = RequestOrigin.of(frame.request)
        room = self._room(key, frame)
        if isinstance(room, str):
            self._counters.moved("in", "declined")
            log.info("reserve_declined", request=asked.request, reason=room)
            connection.send(Declined(frame.stream, room))
            return None
        room_tokens = min(frame.room_tokens, self._engine.identity.context_tokens)
        incoming = IncomingStream(
            key, room, room_tokens, connection, frame.stream, asked, frame.request.tokens
        )
        self._incoming[key] = incoming
        connection.streams[frame.stream] = key
        return incoming

    def _room(self, key: int, frame: Reserve) -> Import | str:
        request = frame.request
        if not self._engine.kv:
            return "this engine takes no KV cache in"
        if request.canary:
            return "a canary does not move"
        if not 0 < request.prompt_tokens <= len(request.tokens) <= frame.room_tokens:
            return (
                f"room for {frame.room_tokens} tokens is wanted, of which {len(request.tokens)} are known "
                f"and {request.prompt_tokens} are the prompt"
            )
        if len(self._incoming) >= MOVES_MAX:
            return f"too many at once: {MOVES_MAX} streams are on their way"
        return self._engine.reserve(key, request, frame.room_tokens)

    def drop(self, key: int, why: str = "") -> None:
        """Give a stream up. With a reason: its frontend is told it."""
        if (incoming := self._incoming.get(key)) is not None:
            incoming.gone = incoming.gone or not why
            self._give_up(incoming, why or "the frontend gave it up")

    def drop_all(self, why: str) -> None:
        """Give up all that are on their way, and tell their frontends why."""
        for key in list(self._incoming):
            self.drop(key, why)

    def _give_up(self, incoming: IncomingStream, why: str) -> None:
        """Free a stream's reservations; what copies from them fails. Off the loop: they may be gigabytes."""
        incoming.why = incoming.why or why
        if incoming.grants:
            asyncio.get_running_loop().run_in_executor(
                None, self._landing.abort, incoming.grants, incoming.why
            )

    # --- how it goes

    async def arrive(self, incoming: IncomingStream) -> bool:
        """Take a stream in that has room; return whether it decodes here, and its frontend is told so."""
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
        """Free what the KV cache of a stream came in."""
        await asyncio.to_thread(self._landing.release, incoming.grants)

    def _end(self, incoming: IncomingStream, why: str) -> None:
        """Free all that a stream had here, and tell its frontend."""
        self._give_up(incoming, why)
        incoming.room.abort()
        self._forget(incoming)
        self._counters.moved("in", "failed")
        log.warning("move_in_failed", request=incoming.asked.request, reason=why)
        if not incoming.gone:
            incoming.connection.send(Declined(incoming.number, why))

    def _forget(self, incoming: IncomingStream) -> None:
        self._incoming.pop(incoming.key, None)
        connection = incoming.connection
        if connection.streams.get(incoming.number) == incoming.key:
            del connection.streams[incoming.number]

    async def _reserve(self, incoming: IncomingStream) -> None:
        """Reserve memory for every shard, and send the grants."""
        own, room = self._engine.kv[0], incoming.room
        first = room.cached_tokens // own.block_size
        blocks = max(1, own.blocks(incoming.room_tokens) - first)
        incoming.grants = await self._landing.grants(blocks, incoming.known, first)
        if incoming.why:  # meanwhile
            raise MoveRefused(incoming.why)
        grants = [msgspec.msgpack.encode(grant) for grant in incoming.grants]
        incoming.connection.send(Reserved(incoming.number, grants, room.cached_tokens))

    async def _arrive(self, incoming: IncomingStream) -> list[Arrived]:
        """Take every shard in while it comes; return what came. Raise MoveRefused when all that runs has ended."""
        shards = range(len(incoming.grants))
        came = await asyncio.gather(
            *(self._arrive_shard(incoming, shard) for shard in shards), return_exceptions=True
        )
        failed = next((one for one in came if isinstance(one, BaseException)), None)
        if failed is not None:
            try:
                raise failed
            finally:
                del failed, came  # else it and its frames would keep each other, and the memory that came
        arrived = [one for one in came if isinstance(one, Arrived)]
        first = arrived[0]
        for other in arrived[1:]:
            if (other.tokens, other.computed, other.state) != (first.tokens, first.computed, first.state):
                raise MoveRefused("the shards do not belong together")
        return arrived

    async def _arrive_shard(self, incoming: IncomingStream, shard: int) -> Arrived:
        receiver, grant = self._landing.receiver, incoming.grants[shard]
        assert receiver is not None
        try:
            return await _taken(receiver, grant, shard, incoming.room, self._take_bytes)
        except BaseException as error:  # the others need not come any more
            self._give_up(incoming, str(error))
            raise

    async def _commit(self, incoming: IncomingStream, arrived: list[Arrived]) -> None:
        """Begin to decode, and tell the frontend. The output is held until then."""
        came_at, first = time.monotonic(), arrived[0]
        state = _state(incoming, first)
        bytes_, blocks = sum(len(one.memory) for one in arrived), self._blocks(arrived)
        begun = asyncio.get_running_loop().time()
        turn = self._trust.turns
        stream = Stream(incoming.connection, incoming.number, False, begun, incoming.asked, turn, held=[])
        self._streams.begin(incoming.key, stream)
        self._streams.first_output(stream)
        try:
            await _within(COMMIT_S_MAX, incoming.room.commit(first.tokens, first.computed))
            if incoming.why:  # meanwhile; the engine is told to forget it, as it decodes already
                raise MoveRefused(incoming.why)
        except BaseException:
            self._streams.end(incoming.key)
            self._engine.cancel(incoming.key)
            raise
        self._incoming.pop(incoming.key)
        stopped_ms = state.stopped_ms + (time.monotonic() - came_at) * 1e3
        said = first.tokens[len(incoming.known) :]
        link = (
            state.link or first.link if first.link == "shm" else first.link
        )  # a source that writes here itself knows how
        incoming.connection.send(Committed(incoming.number, said, bytes_, blocks, link, round(stopped_ms, 3)))
        self._counters.moved("in", "committed", bytes_, stopped_ms / 1e3)
        log.info("moved_in", request=incoming.asked.request, bytes=bytes_, link=link)

    def _blocks(self, arrived: list[Arrived]) -> int:
        return sum(len(a.memory) // own.block_bytes for a, own in zip(arrived, self._engine.kv, strict=True))

    async def close(self) -> None:
        """Give everything up, and wait until it is freed."""
        self.drop_all("this worker is shutting down")
        await self._landing.close()
        if self.tasks:
            await asyncio.wait(self.tasks)


async def _within(seconds: float, commit: Coroutine[Any, Any, None]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await commit
    except TimeoutError:
        raise MoveRefused(f"the engine did not take it over within {seconds:g} s") from None


def _state(incoming: IncomingStream, arrived: Arrived) -> RequestMigrationState:
    """Return the state that came along. Raise MoveRefused if it is of another request."""
    try:
        state = unpacked_state(arrived.state)
    except ValueError as error:
        raise MoveRefused(str(error)) from error
    if differs := difference(state, incoming.asked, arrived.tokens, arrived.computed):
        raise MoveRefused(f"another request: {differs}")
    return state


async def _taken(receiver: Receiver, grant: Grant, shard: int, room: Import, take_bytes: int) -> Arrived:
    """Copy one shard's blocks into the engine as they come; return what came. Raise MoveRefused."""
    size = grant.description.block_bytes
    most = max(1, take_bytes // size)
    arrival = asyncio.wrap_future(receiver.arrival(grant.ticket))
    more = ArrivalProgress()
    arrival.add_done_callback(more.settled)
    receiver.watch(grant.ticket, more)
    taken = 0

    async def take(memory: memoryview) -> int:
        end = min(len(memory) // size, taken + most)
        if end > taken:
            await room.take(shard, grant.first_block + taken, memory[taken * size : end * size])
        return end

    while not arrival.done():
        more.clear()
        before, taken = taken, await take(receiver.received(grant.ticket))
        if taken == before:
            await more.wait()
    came = arrival.result()
    if isinstance(came, TransferRefused):
        raise MoveRefused(came.reason)
    while taken * size < len(came.memory):
        taken = await take(came.memory)
    return came
