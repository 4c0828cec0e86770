"""The simulated engine's `Export` and `Import`: requests that move with the bytes of their KV blocks.

The bytes are made and compared on the loop, in slices that are shorter than a flat-out step: a thread would only fight
the loop for the interpreter lock.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from workers.engines.arrival import objection
from workers.engines.engine import MoveEnded, MoveRefused, Stopped
from workers.engines.simulated.contents import Contents
from workers.engines.simulated.language import VOCABULARY
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.transit import SimulatedArrival, SimulatedDeparture, SimulatedTransit
from workers.kv_transfer.messages import Buffer

SLICE_BYTES = 128 * 1024


class MovingEngine(Protocol):
    """The engine, as a move needs it."""

    shape: EngineShape
    transit: SimulatedTransit

    async def hold(self, departure: SimulatedDeparture) -> None:
        """Hold a request at the present step's end. Raise MoveEnded if the engine stops meanwhile."""
        ...

    def kick(self) -> None:
        """Begin to step if there is something to do."""
        ...


class SimulatedExport:
    """A request on its way out."""

    def __init__(self, host: MovingEngine, departure: SimulatedDeparture) -> None:
        self._host, self._transit = host, host.transit
        self._departure = departure
        sequence, shape = departure.sequence, host.shape
        self._contents = Contents(shape, sequence.tokens)

    def full_blocks(self) -> int:
        return 0 if self._departure.lost else self._departure.computed // self._host.shape.block_tokens

    async def blocks(self, shard: int, first: int, count: int) -> Buffer:
        """Return made-up bytes that follow from the tokens. Raise MoveEnded if it is over, or has no such blocks."""
        self._check()
        shape, computed = self._host.shape, self._departure.computed
        there = -(-computed // shape.block_tokens) if self._departure.held else self.full_blocks()
        if not (0 <= shard < shape.tp and 0 <= first <= first + count <= there):
            raise MoveEnded(f"blocks {first} to {first + count} of shard {shard} were wanted of {there}")
        self._grow()
        made = bytearray()
        for index in range(first, first + count):
            made += self._contents.block(shard, index, computed)
            if len(made) % SLICE_BYTES < shape.kv_block_bytes:
                await asyncio.sleep(0)
                self._check()
        return made

    async def stop(self) -> Stopped:
        self._check()
        if not self._departure.held:
            await self._host.hold(self._departure)
        self._check()
        self._grow()
        return Stopped(list(self._contents.tokens), self._departure.computed)

    def resume(self) -> None:
        self._transit.resume(self._departure)
        self._host.kick()

    def close(self) -> None:
        self._transit.close(self._departure)
        self._host.kick()

    def _grow(self) -> None:
        sequence = self._departure.sequence
        self._contents.grow(sequence.length, sequence.unusual)

    def _check(self) -> None:
        if self._departure.lost:
            raise MoveEnded(self._departure.lost)


class SimulatedImport:
    """Room for a request that comes.

    A block of tokens that were known when the room was reserved is compared when it is taken, so that the commit does not
    take longer where more has come; the others wait for the commit, which says their tokens.
    """

    def __init__(self, host: MovingEngine, arrival: SimulatedArrival) -> None:
        self._host, self._transit = host, host.transit
        self._arrival = arrival
        self._contents = Contents(host.shape, arrival.request.tokens)
        self.cached_tokens = arrival.cached_tokens

    async def take(self, shard: int, first: int, data: Buffer) -> None:
        """Compare what came, as far as its tokens are known. Raise MoveRefused if there is no room for it."""
        self._check()
        shape, view = self._host.shape, memoryview(data).cast("B")
        size = shape.kv_block_bytes
        last, known = first + len(view) // size, len(self._contents.tokens) // shape.block_tokens
        room = -(-self._arrival.room_tokens // shape.block_tokens)
        if not (0 <= shard < shape.tp and first >= 0 and last <= room) or len(view) % size:
            self.abort()
            raise MoveRefused(
                f"{len(view)} bytes came for shard {shard} from block {first} on: there is room for {room} blocks"
            )
        if shape.kv_token_s:
            await asyncio.sleep((last - first) * shape.block_tokens * shape.kv_token_s)
            self._check()
        for index in range(first, last):
            came = bytes(view[(index - first) * size :][:size])
            same = index < known and came == self._contents.block(shard, index, len(self._contents.tokens))
            self._arrival.taken[shard, index] = None if same else came
            if (index + 1) * size % SLICE_BYTES < size:
                await asyncio.sleep(0)
                self._check()

    async def commit(self, tokens: Sequence[int], computed: int) -> None:
        """Compare the rest, and begin to decode. Raise MoveRefused if anything is not what it must be."""
        self._check()
        try:
            arrival, context = self._arrival, self._host.shape.context_tokens
            against = objection(
                arrival.request, arrival.room_tokens, tokens, computed, context=context, vocabulary=VOCABULARY
            )
            if against := against or await self._difference(tokens, computed):
                raise MoveRefused(against)
            self._check()
        except BaseException:
            self.abort()
            raise
        self._transit.settle(self._arrival, list(tokens))
        self._arrival.taken.clear()
        self._host.kick()

    def abort(self) -> None:
        self._transit.abort(self._arrival)
        self._host.kick()

    async def _difference(self, tokens: Sequence[int], computed: int) -> str:
        """Say where what came is not what must be there; empty if nowhere."""
        shape, taken, contents = self._host.shape, self._arrival.taken, self._contents
        contents.extend(tokens[len(contents.tokens) :])
        cached, end = self.cached_tokens // shape.block_tokens, -(-computed // shape.block_tokens)
        compared = 0
        for shard in range(shape.tp):
            for index in range(cached, end):
                came = taken.get((shard, index), b"")
                if came is None and (index + 1) * shape.block_tokens <= computed:
                    continue
                if came == b"":
                    return f"block {index} of shard {shard} did not come"
                if came != contents.block(shard, index, computed):
                    return f"block {index} of shard {shard} is not what it must be"
                compared += shape.kv_block_bytes
                if compared % SLICE_BYTES < shape.kv_block_bytes:
                    await asyncio.sleep(0)
                    self._check()
        return ""

    def _check(self) -> None:
        if self._arrival.over:
            raise MoveRefused(self._arrival.over)
