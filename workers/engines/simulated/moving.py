"""The simulated engine's `Export` and `Import`, which move requests with the bytes of their KV blocks.

    a block    the bytes of its tokens, in order; zeros where there is no token yet, and to fill the block
    a token    a hash of the TP rank and of all tokens up to and including this token, repeated to the size of a token

So the target detects any byte that was lost, duplicated, altered, or moved to another position, block, rank or request. It also
detects any difference in the earlier tokens. The bytes are not stored. The source computes them when it sends a block, and the
target computes them again when it receives the block. Both compute on the event loop in short slices, because a thread would only
contend for the interpreter lock.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import xxhash

from workers.engines.engine import MoveEnded, MoveRefused, Stopped, validate_import
from workers.engines.simulated import language
from workers.engines.simulated.language import TOKEN_BYTES, VOCABULARY
from workers.engines.simulated.rank import SimulatedRank
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import SimulatedArrival, SimulatedDeparture
from workers.kv_transfer.messages import Buffer

_DIGEST_BYTES = 16
SLICE_BYTES = 128 * 1024  # bytes that are computed before other callbacks of the event loop may run


class Contents:
    """Computes the bytes of one sequence's KV blocks from its tokens. More tokens can be appended."""

    def __init__(self, shape: EngineShape, tokens: Sequence[int], adapter: str) -> None:
        """Begin a sequence with these tokens, computed with this adapter, or without one if `adapter` is empty."""
        self.tokens: list[int] = []
        self._shape = shape
        self._token_bytes = shape.kv_block_bytes // shape.block_tokens
        self._hash = language.open_sequence(shape.weights(adapter), ())
        self._prefixes: list[bytes] = []  # digest of the prefix up to and including each token
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append these tokens to the sequence."""
        for token in tokens:
            self._add(token)

    def grow(self, length: int, unusual: Mapping[int, int]) -> None:
        """Append tokens until the sequence has this length.

        `unusual` maps positions to tokens. At other positions, the token is the one that the hash of the earlier tokens selects.
        """
        for place in range(len(self.tokens), length):
            token = unusual.get(place)
            self._add(language.plain_token(self._hash.intdigest()) if token is None else token)

    def block(self, rank: int, index: int, computed: int) -> bytes:
        """Return the bytes of one TP rank's block at `index`.

        Only the first `computed` tokens of the sequence have KV. The bytes of the other tokens are zeros.
        """
        first, size = index * self._shape.block_tokens, self._shape.block_tokens
        times = -(-self._token_bytes // _DIGEST_BYTES)
        held = [
            (xxhash.xxh3_128_digest(prefix, seed=rank) * times)[: self._token_bytes]
            for prefix in self._prefixes[first : min(first + size, computed)]
        ]
        return b"".join(held).ljust(self._shape.kv_block_bytes, b"\0")

    def _add(self, token: int) -> None:
        self._hash.update(TOKEN_BYTES[token])
        self._prefixes.append(self._hash.digest())
        self.tokens.append(token)


class SimulatedExport:
    """The `Export` of a request that moves to another worker with its KV blocks."""

    def __init__(self, rank: SimulatedRank, departure: SimulatedDeparture) -> None:
        self._rank, self._transit = rank, rank.transit
        self._departure = departure
        sequence, shape = departure.sequence, rank.shape
        self._contents = Contents(shape, sequence.tokens, sequence.request.adapter)

    def full_blocks(self) -> int:
        return 0 if self._departure.lost else self._departure.computed // self._rank.shape.block_tokens

    async def blocks(self, shard: int, first: int, count: int) -> Buffer:
        """Compute and return the bytes of `count` blocks of one TP rank, from the block at index `first` on.

        Raise MoveEnded if the request cannot move any more, or if these blocks do not exist yet.
        """
        self._check()
        shape, computed = self._rank.shape, self._departure.computed
        there = -(-computed // shape.block_tokens) if self._departure.held else self.full_blocks()
        if not (0 <= shard < shape.tp and 0 <= first <= first + count <= there):
            asked = f"blocks {first} to {first + count} of shard {shard}"
            raise MoveEnded(f"{asked} were requested; there are {there}")
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
            await self._rank.hold(self._departure)
        self._check()
        self._grow()
        return Stopped(list(self._contents.tokens), self._departure.computed)

    def resume(self) -> None:
        self._transit.resume(self._departure)
        self._rank.kick()

    def close(self) -> None:
        self._transit.close(self._departure)
        self._rank.kick()

    def _grow(self) -> None:
        sequence = self._departure.sequence
        self._contents.grow(sequence.length, sequence.unusual)

    def _check(self) -> None:
        if self._departure.lost:
            raise MoveEnded(self._departure.lost)


class SimulatedImport:
    """The `Import` of an arriving request, which compares each arrived block with the expected bytes.

    If the tokens of a block were known at the reservation, the block is compared when it arrives. This keeps `commit` short for a
    long request. The other blocks are compared by `commit`, which receives the tokens of the whole sequence.
    """

    def __init__(self, rank: SimulatedRank, arrival: SimulatedArrival) -> None:
        self._rank, self._transit = rank, rank.transit
        self._arrival = arrival
        self._contents = Contents(rank.shape, arrival.request.tokens, arrival.request.adapter)
        self.cached_tokens = arrival.cached_tokens

    async def take(self, shard: int, first: int, data: Buffer) -> None:
        """Accept arrived blocks, and compare each block with the expected bytes if its tokens are already known.

        Raise MoveRefused if the blocks are outside of the reservation, or if the reservation has ended.
        """
        self._check()
        shape, view = self._rank.shape, memoryview(data).cast("B")
        size = shape.kv_block_bytes
        last, known = first + len(view) // size, len(self._contents.tokens) // shape.block_tokens
        room = -(-self._arrival.room_tokens // shape.block_tokens)
        if not (0 <= shard < shape.tp and first >= 0 and last <= room) or len(view) % size:
            self._abort()
            where = f"for shard {shard} from block {first} on"
            raise MoveRefused(f"{len(view)} bytes arrived {where}, but there is room for {room} blocks")
        if shape.kv_token_s:
            await asyncio.sleep((last - first) * shape.block_tokens * shape.kv_token_s)
            self._check()
        for index in range(first, last):
            arrived = bytes(view[(index - first) * size :][:size])
            same = index < known and arrived == self._contents.block(shard, index, len(self._contents.tokens))
            self._arrival.taken[shard, index] = None if same else arrived
            if (index + 1) * size % SLICE_BYTES < size:
                await asyncio.sleep(0)
                self._check()

    async def commit(self, tokens: Sequence[int], computed: int) -> None:
        """Compare the remaining blocks and start to decode the arrived request.

        Raise MoveRefused if a byte differs, a block is missing, or the tokens do not match the reservation.
        """
        self._check()
        try:
            arrival, context = self._arrival, self._rank.shape.context_tokens
            against = validate_import(
                arrival.request, arrival.room_tokens, tokens, computed, context=context, vocabulary=VOCABULARY
            )
            if against := against or await self._difference(tokens, computed):
                raise MoveRefused(against)
            self._check()
        except BaseException:
            self._abort()
            raise
        self._transit.settle(self._arrival, list(tokens))
        self._arrival.taken.clear()
        self._rank.kick()

    def _abort(self) -> None:
        self._transit.abort(self._arrival)
        self._rank.kick()

    async def _difference(self, tokens: Sequence[int], computed: int) -> str:
        """Return a description of the first missing or wrong block; empty if all blocks are right."""
        shape, taken, contents = self._rank.shape, self._arrival.taken, self._contents
        contents.extend(tokens[len(contents.tokens) :])
        cached, end = self.cached_tokens // shape.block_tokens, -(-computed // shape.block_tokens)
        compared = 0
        for shard in range(shape.tp):
            for index in range(cached, end):
                arrived = taken.get((shard, index), b"")
                if arrived is None and (index + 1) * shape.block_tokens <= computed:
                    continue
                if arrived == b"":
                    return f"block {index} of shard {shard} did not arrive"
                if arrived != contents.block(shard, index, computed):
                    return f"block {index} of shard {shard} has wrong content"
                compared += shape.kv_block_bytes
                if compared % SLICE_BYTES < shape.kv_block_bytes:
                    await asyncio.sleep(0)
                    self._check()
        return ""

    def _check(self) -> None:
        if self._arrival.over:
            raise MoveRefused(self._arrival.over)
