"""Tracks a target's reservations for KV transfers: limits, deadlines, and the bytes verified so far.

A reservation states how many bytes a source may write, and until when:

    reserve ──▶ open ── every chunk marked, tokens agree ──▶ committed ── the engine has copied it ──▶ (gone)
                 └───────────── abort, deadline ─────────────────┴───────────────────────────────────▶ (gone)

The ledger uses neither sockets nor memory regions, and its callers pass the current time. A call that refuses a message raises
TransferFailed and changes nothing. The caller must then abort the reservation. Every call that ends a reservation returns that
reservation, so that the caller can free the reservation's resources.

Chunks may arrive in any order and more than once. Adjacent chunks are merged into one interval of bytes, so that chunks which
arrive in order leave a single interval.
"""

import secrets
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from workers.kv_transfer.messages import (
    STATE_BYTES_MAX,
    VERSION,
    Description,
    Ending,
    KvChunk,
    Open,
    TransferFailed,
    digest,
    packed,
)

# size of sent chunks; with two threads at the source, 1 MiB and 4 MiB were measured a tenth slower
CHUNK_BYTES = 1 << 21
CHUNK_BYTES_MAX = 1 << 22
CHUNKS_MAX = 1 << 16


class Coverage:
    """Tracks the verified chunks of one reservation and the intervals of bytes that they cover."""

    def __init__(self, size: int) -> None:
        """Start without chunks. `size` is the size of the region in bytes."""
        self.size = size
        self.bytes = 0
        self._chunks: dict[int, KvChunk] = {}
        self._begins: list[int] = []
        self._ends: list[int] = []

    @property
    def count(self) -> int:
        """Number of different chunks that have arrived."""
        return len(self._chunks)

    @property
    def prefix(self) -> int:
        """Number of bytes from the start of the region that have arrived without a gap."""
        return self._ends[0] if self._begins and self._begins[0] == 0 else 0

    def repeated(self, chunk: KvChunk) -> bool:
        """Return whether `mark` has already recorded an equal chunk."""
        return self._chunks.get(chunk.number) == chunk

    def objection(self, chunk: KvChunk) -> str:
        """Return why a chunk must be refused; empty if it is acceptable. Call this only if `repeated` returns False."""
        where = f"chunk {chunk.number}"
        if chunk.number in self._chunks:
            return f"{where} arrived twice with different contents"
        if not 0 <= chunk.number < CHUNKS_MAX:
            return f"{where} is not between 0 and {CHUNKS_MAX - 1}"
        if not 0 < chunk.bytes <= CHUNK_BYTES_MAX:
            return f"{where} has {chunk.bytes} bytes, not 1 to {CHUNK_BYTES_MAX}"
        end = chunk.offset + chunk.bytes
        if chunk.offset < 0 or end > self.size:
            return f"{where} is outside the region: bytes {chunk.offset} to {end} of {self.size}"
        after = bisect_right(self._begins, chunk.offset)
        if (after and self._ends[after - 1] > chunk.offset) or (
            after < len(self._begins) and self._begins[after] < end
        ):
            return f"{where} overlaps another"
        return ""

    def mark(self, chunk: KvChunk) -> None:
        """Record a verified chunk. `objection` must have returned no reason to refuse the chunk."""
        begin, end = chunk.offset, chunk.offset + chunk.bytes
        self._chunks[chunk.number] = chunk
        self.bytes += chunk.bytes
        after = bisect_right(self._begins, begin)
        if after < len(self._begins) and self._begins[after] == end:
            self._begins[after] = begin
        else:
            self._begins.insert(after, begin)
            self._ends.insert(after, end)
        if after and self._ends[after - 1] == begin:
            self._ends[after - 1] = self._ends[after]
            del self._begins[after], self._ends[after]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationPolicy:
    """Limits on the reservations of one target."""

    live_max: int = 16  # maximum number of reservations per shard
    bytes_max: int = 4 << 30  # maximum size of all reservations
    lasts: timedelta = timedelta(seconds=30)  # time until a reservation ends


@dataclass(slots=True)
class KvReservation:
    """The size and deadline of one reservation, and the progress of its transfer."""

    ticket: str
    size: int  # bytes
    deadline_s: float  # by the same clock as `now_s`
    coverage: Coverage
    count: int  # number of the request's tokens when the reservation was made
    digest: bytes  # digest of those tokens
    own: Description  # the format of the target's blocks
    first_block: int = 0  # the target already has the blocks before this one
    opened: bool = False  # whether a source has opened the reservation
    ending: Ending | None = field(default=None, repr=False)  # None until the reservation is committed

    def need(self, computed: int) -> int:
        """Return how many bytes the source must send: the blocks of `computed` tokens without those that the target has."""
        return max(0, self.own.blocks(computed) - self.first_block) * self.own.block_bytes


class TransferReservations:
    """Makes the reservations of one target, and checks each source's messages against its reservation."""

    def __init__(
        self,
        own: Sequence[Description],
        policy: ReservationPolicy,
        name: Callable[[], str] = lambda: secrets.token_hex(12),
    ) -> None:
        """Accept only KV blocks of the formats in `own`, one for each shard.

        `name` returns a new ticket, the id of a reservation.
        """
        self._own = {one.rank: one for one in own}
        self._policy = policy
        self._name = name
        self._live: dict[str, KvReservation] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def bytes(self) -> int:
        """Total size of all reservations, in bytes."""
        return sum(one.size for one in self._live.values())

    def get(self, ticket: str) -> KvReservation | None:
        """Return the reservation of this ticket; None if it has ended or never existed."""
        return self._live.get(ticket)

    def reserve(
        self,
        description: Description,
        blocks: int,
        tokens: Sequence[int],
        now_s: float,
        first_block: int = 0,
    ) -> KvReservation:
        """Reserve `blocks` KV blocks of one shard for a request, starting at block `first_block` of the request's sequence.

        `tokens` are the request's tokens so far, and the arriving sequence must begin with them. `now_s` is the time in seconds
        of any monotonic clock. Raise TransferFailed if the format differs or a limit is exceeded.
        """
        own = self._own.get(description.rank)
        if own is None:
            raise TransferFailed(
                f"another model: rank is {description.rank} there, which does not exist here"
            )
        if differs := own.difference(description):
            raise TransferFailed(f"another model: {differs}")
        if blocks < 1 or first_block < 0:
            raise TransferFailed(f"cannot reserve {blocks} blocks from block {first_block} on")
        if sum(one.own is own for one in self._live.values()) >= self._policy.live_max:
            raise TransferFailed(f"too many at once: {self._policy.live_max} reservations are live")
        need = blocks * own.block_bytes
        if need > (free := self._policy.bytes_max - self.bytes):
            raise TransferFailed(f"no room: {need} bytes requested, {free} free")
        try:
            so_far = packed(tokens)
        except (OverflowError, TypeError):
            raise TransferFailed("the tokens are not token ids") from None
        deadline_s, known = now_s + self._policy.lasts.total_seconds(), digest(so_far)
        made = KvReservation(
            self._name(), need, deadline_s, Coverage(need), len(tokens), known, own, first_block
        )
        self._live[made.ticket] = made
        return made

    def open(self, message: Open, now_s: float) -> KvReservation:
        """Record that a source uses the reservation that `message` names, and return the reservation.

        Raise TransferFailed if the versions or formats differ, if the reservation already has a source, or if the reservation
        has ended.
        """
        found = self._find_open(message.ticket, now_s)
        if message.version != VERSION:
            raise TransferFailed(f"version {message.version} of the transfer is not supported here")
        if differs := found.own.difference(message.description):
            raise TransferFailed(f"another model: {differs}")
        if found.opened:
            raise TransferFailed("this reservation has a source already")
        found.opened = True
        return found

    def check(self, ticket: str, chunk: KvChunk, now_s: float) -> bool:
        """Return whether the reservation `ticket` still needs a chunk; False if an equal chunk is already recorded.

        Raise TransferFailed if the chunk is invalid.
        """
        found = self._find_open(ticket, now_s)
        if chunk.ticket != ticket:
            raise TransferFailed(f"chunk {chunk.number} belongs to another ticket")
        if found.coverage.repeated(chunk):
            return False
        if objection := found.coverage.objection(chunk):
            raise TransferFailed(objection)
        return True

    def mark(self, ticket: str, chunk: KvChunk, xxh3: int, now_s: float) -> None:
        """Record a chunk after its bytes have arrived. Raise TransferFailed if the chunk is invalid or damaged.

        `xxh3` is the xxh3-64 of the chunk's bytes in the region. An equal chunk that is already marked changes nothing.
        """
        if self.check(ticket, chunk, now_s):
            if xxh3 != chunk.xxh3:
                raise TransferFailed(f"chunk {chunk.number} is damaged: its checksum differs")
            self._live[ticket].coverage.mark(chunk)

    def commit(self, ticket: str, ending: Ending, now_s: float) -> KvReservation:
        """Commit a reservation if its transfer is complete, and return the reservation.

        Raise TransferFailed if bytes are missing, or if the tokens of `ending` do not continue those of the reservation.
        """
        found = self._find_open(ticket, now_s)
        if objection := self._commit_objection(found, ending):
            raise TransferFailed(objection)
        found.ending = ending
        return found

    def _commit_objection(self, one: KvReservation, ending: Ending) -> str:
        if ending.ticket != one.ticket:
            return "the ending belongs to another ticket"
        if ending.count * 4 != len(ending.tokens) or digest(ending.tokens) != ending.digest:
            return "the tokens are not those of their count and digest"
        if ending.count < one.count or digest(ending.tokens[: one.count * 4]) != one.digest:
            return "the tokens do not continue those of the reservation"
        if not 0 < ending.computed <= ending.count:
            return f"the source claims the KV of {ending.computed} of {ending.count} tokens"
        if len(ending.state) > STATE_BYTES_MAX:
            return f"the state has {len(ending.state)} bytes, more than {STATE_BYTES_MAX}"
        need = one.need(ending.computed)
        if (ending.chunks, need, need) != (one.coverage.count, one.coverage.bytes, one.coverage.prefix):
            arrived = f"{one.coverage.bytes} of {need} bytes, {one.coverage.prefix} of them without a gap"
            return f"not all arrived: {arrived}, in {one.coverage.count} of {ending.chunks} chunks"
        return ""

    def _find_open(self, ticket: str, now_s: float) -> KvReservation:
        found = self._live.get(ticket)
        if found is None:
            raise TransferFailed("the reservation does not exist, or has ended")
        if found.deadline_s <= now_s:
            raise TransferFailed("the reservation's deadline has passed")
        if found.ending is not None:
            raise TransferFailed("the reservation is committed already")
        return found

    def abort(self, ticket: str) -> KvReservation | None:
        """End a reservation in any state, even after the engine has copied the bytes.

        Return the reservation; None if it has already ended.
        """
        return self._live.pop(ticket, None)

    def expire(self, now_s: float) -> list[KvReservation]:
        """End and return the reservations with a deadline that has passed, including committed ones."""
        ended = [one for one in self._live.values() if one.deadline_s <= now_s]
        for one in ended:
            del self._live[one.ticket]
        return ended
