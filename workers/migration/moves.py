"""All planned moves of one worker, in and out."""

import asyncio
import contextlib
from collections.abc import Sequence

from events.observations import KvLayout
from workers.counters import WorkerCounters
from workers.engines.engine import Engine
from workers.frontends import StreamTable
from workers.kv_transfer.messages import Description
from workers.kv_transfer.transport import Transport
from workers.migration.settings import KvMoveSettings
from workers.migration.source import OutgoingMigrations
from workers.migration.target import IncomingMigrations, Landing
from workers.migration.trust import Trust

CLOSE_S_MAX = 0.9


def layout(shards: Sequence[Description]) -> KvLayout | None:
    """Return what a worker with these shards registers of its KV cache; None: nothing of it can move."""
    if not shards:
        return None
    one, heads = shards[0], sum(shard.heads for shard in shards)
    numbers = (
        2 * one.layers * one.heads * one.head_size * one.block_size
    )  # keys and values, in one shard's block
    return KvLayout(
        layers=one.layers,
        kv_heads=heads,
        head_size=one.head_size,
        element_bytes=max(1, round(one.block_bytes / numbers)),
    )


class WorkerMigrations:
    """What a worker's server and its commands need of them."""

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
        self.landing = Landing(instance, lambda: engine.kv, settings, lambda: self._transport)
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
        """Load the transport that is wanted, if one is: it takes seconds, and no move is to wait for it."""
        if self._make_transport is not None:
            self._transport = await asyncio.to_thread(self._make_transport)

    async def close(self) -> None:
        """End all, and free what they had: threads, connections, files."""
        self.source.close()
        with contextlib.suppress(TimeoutError):  # what is left ends with the process
            async with asyncio.timeout(CLOSE_S_MAX):
                await self.target.close()
