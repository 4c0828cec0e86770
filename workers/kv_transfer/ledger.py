"""The reservations of a transfer's target: limits, deadlines, and the verified bytes so far.

A reservation states how many bytes a source may write, and its deadline.

    reserve ──▶ open ── every chunk marked, tokens agree ──▶ committed ── the engine has taken it ──▶ (gone)
                 └───────────── abort, deadline ─────────────────┴──────────────────────────────────▶ (gone)

The ledger has neither sockets nor memory, and takes the time as an argument. A refusal changes nothing; the caller that
refuses a source aborts its reservation. Every call that ends a reservation returns it, so that the caller can free its
resources.

Chunks may arrive in any order and more than once. The intervals that have arrived are kept merged: chunks that arrive in
order leave one interval, whatever their number.
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
    TransferRefused,
    digest,
    packed,
)

CHUNK_BYTES = 1 << 21  # with a source of two threads, 1 MiB and 4 MiB were measured a tenth slower
CHUNK_BYTES_MAX = 1 << 22
CHUNKS_MAX = 1 << 16


class Coverage:
    """The verified chunks of one reservation."""

    def __init__(self, size: int) -> None:
        """Expect chunks within this many bytes."""
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
        """Number of bytes that have arrived without a gap, from the first."""
        return self._ends[0] if self._begins and self._begins[0] == 0 else 0

    def repeated(self, chunk: KvChunk) -> bool:
        """Return whether exactly this chunk is already marked."""
        return self._chunks.get(chunk.number) == chunk

    def objection(self, chunk: KvChunk) -> str:
        """Return why a chunk that is not a repetition must be refused; empty if it is accepted."""
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
        """Record an accepted chunk."""
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
    """How many reservations to hold at once, and for how long."""

    live_max: int = 16  # of one shard
    bytes_max: int = 4 << 30
    lasts: timedelta = timedelta(seconds=30)


@dataclass(slots=True)
class KvReservation:
    """One reservation of one source."""

    ticket: str
    size: int  # bytes
    deadline_s: float  # by the same clock as `now_s`
    coverage: Coverage
    count: int  # number of tokens known when it was made
    digest: bytes  # of these tokens
    own: Description
    first_block: int = 0  # the target already has the blocks before this one
    opened: bool = False
    ending: Ending | None = field(default=None, repr=False)

    def need(self, computed: int) -> int:
        """Return the number of bytes that must arrive for this many computed tokens."""
        return max(0, self.own.blocks(computed) - self.first_block) * self.own.block_bytes


class TransferReservations:
    """The reservations of one target."""

    def __init__(
        self,
        own: Sequence[Description],
        policy: ReservationPolicy,
        name: Callable[[], str] = lambda: secrets.token_hex(12),
    ) -> None:
        """Accept blocks of these descriptions only, one of each shard. `name` creates unique tickets."""
        self._own = {one.rank: one for one in own}
        self._policy = policy
        self._name = name
        self._live: dict[str, KvReservation] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def bytes(self) -> int:
        """Number of reserved bytes."""
        return sum(one.size for one in self._live.values())

    def get(self, ticket: str) -> KvReservation | None:
        """Return a reservation that has not ended."""
        return self._live.get(ticket)

    def reserve(
        self,
        description: Description,
        blocks: int,
        tokens: Sequence[int],
        now_s: float,
        first_block: int = 0,
    ) -> KvReservation | TransferRefused:
        """Reserve `blocks` blocks, starting at `first_block` of the sequence, for a request.

        `tokens` are the request's tokens so far; the arriving sequence must begin with them.
        """
        own = self._own.get(description.rank)
        if own is None:
            return TransferRefused(
                f"another model: rank is {description.rank} there, which does not exist here"
            )
        if differs := own.difference(description):
            return TransferRefused(f"another model: {differs}")
        if blocks < 1 or first_block < 0:
            return TransferRefused(f"cannot reserve {blocks} blocks from block {first_block} on")
        if sum(one.own is own for one in self._live.values()) >= self._policy.live_max:
            return TransferRefused(f"too many at once: {self._policy.live_max} reservations are live")
        need = blocks * own.block_bytes
        if need > (free := self._policy.bytes_max - self.bytes):
            return TransferRefused(f"no room: {need} bytes requested, {free} free")
        try:
            so_far = packed(tokens)
        except (OverflowError, TypeError):
            return TransferRefused("the tokens are not token ids")
        made = KvReservation(
            self._name(),
            need,
            now_s + self._policy.lasts.total_seconds(),
            Coverage(need),
            len(tokens),
            digest(so_far),
            own,
            first_block,
        )
        self._live[made.ticket] = made
        return made

    def open(self, message: Open, now_s: float) -> KvReservation | TransferRefused:
        """Admit the source. A reservation has one source, which opens it once."""
        found = self._find_open(message.ticket, now_s)
        if isinstance(found, TransferRefused):
            return found
        if message.version != VERSION:
            return TransferRefused(f"version {message.version} of the transfer is not supported here")
        if differs := found.own.difference(message.description):
            return TransferRefused(f"another model: {differs}")
        if found.opened:
            return TransferRefused("this reservation has a source already")
        found.opened = True
        return found

    def check(self, ticket: str, chunk: KvChunk, now_s: float) -> bool | TransferRefused:
        """Return whether a chunk is needed: False for a repetition, which changes nothing."""
        found = self._find_open(ticket, now_s)
        if isinstance(found, TransferRefused):
            return found
        if chunk.ticket != ticket:
            return TransferRefused(f"chunk {chunk.number} belongs to another ticket")
        if found.coverage.repeated(chunk):
            return False
        objection = found.coverage.objection(chunk)
        return TransferRefused(objection) if objection else True

    def mark(self, ticket: str, chunk: KvChunk, xxh3: int, now_s: float) -> TransferRefused | None:
        """Record a needed chunk; `xxh3` is the xxh3-64 of its bytes in the region."""
        needed = self.check(ticket, chunk, now_s)
        if isinstance(needed, TransferRefused):
            return needed
        if needed and xxh3 != chunk.xxh3:
            return TransferRefused(f"chunk {chunk.number} is damaged: its checksum differs")
        if needed:
            self._live[ticket].coverage.mark(chunk)
        return None

    def commit(self, ticket: str, ending: Ending, now_s: float) -> KvReservation | TransferRefused:
        """Commit a reservation: all its bytes have arrived, and both sides agree on the tokens."""
        found = self._find_open(ticket, now_s)
        if isinstance(found, TransferRefused):
            return found
        if objection := self._commit_objection(found, ending):
            return TransferRefused(objection)
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

    def _find_open(self, ticket: str, now_s: float) -> KvReservation | TransferRefused:
        found = self._live.get(ticket)
        if found is None:
            return TransferRefused("the reservation does not exist, or has ended")
        if found.deadline_s <= now_s:
            return TransferRefused("the reservation's deadline has passed")
        if found.ending is not None:
            return TransferRefused("the reservation is committed already")
        return found

    def abort(self, ticket: str) -> KvReservation | None:
        """End a reservation in any state. An engine that has taken the bytes ends it this way too."""
        return self._live.pop(ticket, None)

    def expire(self, now_s: float) -> list[KvReservation]:
        """End the reservations that have expired, including committed ones."""
        ended = [one for one in self._live.values() if one.deadline_s <= now_s]
        for one in ended:
            del self._live[one.ticket]
        return ended
