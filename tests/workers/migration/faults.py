"""Engines with hooks at points of a move, and a proxy between two workers that alters bytes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from move_kit import SHAPE, STEP_S

from events.wire import Generate
from workers.engines.engine import Stopped
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.timing import ConstantTiming
from workers.kv_transfer.messages import Buffer, Grant, TransferAddress

At = Callable[[], Awaitable[None]]
SOURCE_POINTS = ("first block", "stop", "tail")
TARGET_POINTS = ("take", "commit", "committed")
POINTS = (*SOURCE_POINTS, *TARGET_POINTS)


class Watched(SimulatedEngine):
    """A simulated engine with hooks at points of a move."""

    def __init__(self, step_s: float = STEP_S) -> None:
        super().__init__(SHAPE, ConstantTiming(itl_s=step_s))
        self.at: dict[str, At] = {}

    async def reach(self, point: str) -> None:
        """Run the hook of this point, once."""
        if (happens := self.at.pop(point, None)) is not None:
            await happens()

    def export(self, key: int) -> Any:
        made = super().export(key)
        return None if made is None else _Export(self, made)

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Any:
        made = super().reserve(key, request, room_tokens)
        return made if isinstance(made, str) else _Import(self, made)


class _Export:
    def __init__(self, engine: Watched, inner: Any) -> None:
        self._engine, self._inner, self._stopped = engine, inner, False
        self.full_blocks, self.resume, self.close = inner.full_blocks, inner.resume, inner.close

    async def blocks(self, shard: int, first: int, count: int) -> Buffer:
        await self._engine.reach("tail" if self._stopped else "first block")
        return await self._inner.blocks(shard, first, count)  # type: ignore[no-any-return]

    async def stop(self) -> Stopped:
        await self._engine.reach("stop")
        self._stopped = True
        return await self._inner.stop()  # type: ignore[no-any-return]


class _Import:
    def __init__(self, engine: Watched, inner: Any) -> None:
        self._engine, self._inner = engine, inner
        self.cached_tokens = inner.cached_tokens

    async def take(self, shard: int, first: int, data: Buffer) -> None:
        await self._engine.reach("take")
        await self._inner.take(shard, first, data)

    async def commit(self, tokens: Sequence[int], computed: int) -> None:
        await self._engine.reach("commit")
        await self._inner.commit(tokens, computed)
        await self._engine.reach("committed")


def over_tcp(grants: list[bytes], port: int = 0) -> list[bytes]:
    """Return grants for a source on another host; with a port, it connects through our proxy."""
    read = [msgspec.msgpack.decode(one, type=Grant) for one in grants]
    ends = [TransferAddress(one.endpoint.host, port or one.endpoint.port) for one in read]
    return [
        msgspec.msgpack.encode(msgspec.structs.replace(one, endpoint=end, region=""))
        for one, end in zip(read, ends, strict=True)
    ]


@asynccontextmanager
async def line(grants: list[bytes], at: int, flip: int) -> AsyncIterator[list[bytes]]:
    """Forward what sources send, but flip byte `at` of a connection by `flip`; 0: cut the connection there."""
    to = msgspec.msgpack.decode(grants[0], type=Grant).endpoint
    busy: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        busy.add(task)
        there, back = await asyncio.open_connection(to.host, to.port)
        answers = asyncio.ensure_future(_pass(there, writer, -1, 0))
        with suppress(OSError):
            await _pass(reader, back, at, flip)
        back.close()
        await answers
        busy.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield over_tcp(grants, server.sockets[0].getsockname()[1])
    finally:
        server.close()
        if busy:
            await asyncio.wait(busy, timeout=10)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, at: int, flip: int) -> None:
    passed = 0
    with suppress(OSError):
        while data := bytearray(await reader.read(65536)):
            if passed <= at < passed + len(data):
                if not flip:
                    writer.write(bytes(data[: at - passed]))
                    break
                data[at - passed] ^= flip
            passed += len(data)
            writer.write(bytes(data))
            await writer.drain()
    writer.close()
