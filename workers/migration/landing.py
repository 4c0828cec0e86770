"""Where KV caches land: the worker's receiver, made when somebody first wants to send one."""

import asyncio
from collections.abc import Callable, Sequence

import xxhash

from workers.engines.engine import MoveRefused
from workers.kv_transfer.errors import RegionTaken
from workers.kv_transfer.messages import Description, Grant, TransferRefused
from workers.kv_transfer.receiver import Receiver
from workers.kv_transfer.regions import NAME, Regions
from workers.kv_transfer.transport import Transport
from workers.migration.settings import KvMoveSettings

CLOSE_S_MAX = 0.7


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
