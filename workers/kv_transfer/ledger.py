"""The target's reservations: who may write how much, until when, and what of it has arrived?

    reserve ──▶ open ── every chunk marked, tokens agree ──▶ committed ── the engine has taken it ──▶ (gone)
                 └───────────── abort, deadline ─────────────────┴──────────────────────────────────▶ (gone)

It knows neither sockets nor memory, and takes the time as an argument. A refusal changes nothing; whoever refuses a
source aborts its reservation. What ends a reservation returns it, so that the caller can free what belongs to it.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from workers.kv_transfer.chunks import Coverage
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationPolicy:
    """How much to promise at once, and for how long."""

    live_max: int = 16  # of one shard
    bytes_max: int = 4 << 30
    lasts: timedelta = timedelta(seconds=30)


@dataclass(slots=True)
class KvReservation:
    """One promise to one source."""

    ticket: str
    size: int  # bytes
    deadline_s: float  # of the clock that `now_s` is of
    coverage: Coverage
    count: int  # tokens known when it was made
    digest: bytes  # of those
    own: Description
    first_block: int = 0  # the target has those before it
    opened: bool = False
    ending: Ending | None = field(default=None, repr=False)

    def need(self, computed: int) -> int:
        """Return how many bytes must arrive for this many computed tokens."""
        return max(0, self.own.blocks(computed) - self.first_block) * self.own.block_bytes


class TransferReservations:
    """The ledger of one target."""

    def __init__(
        self,
        own: Sequence[Description],
        policy: ReservationPolicy,
        name: Callable[[], str] = lambda: secrets.token_hex(12),
    ) -> None:
        """Promise blocks of these descriptions only, one of each shard. `name` invents tickets; none may come twice."""
        self._own = {one.rank: one for one in own}
        self._policy = policy
        self._name = name
        self._live: dict[str, KvReservation] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def bytes(self) -> int:
        """How many bytes are promised."""
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
        """Promise room for `blocks` blocks, from `first_block` of the sequence on, of a request whose tokens so far
        are these; what arrives must begin with them."""
        own = self._own.get(description.rank)
        if own is None:
            return TransferRefused(
                f"another model: rank is {description.rank} there, and there is none such here"
            )
        if differs := own.difference(description):
            return TransferRefused(f"another model: {differs}")
        if blocks < 1 or first_block < 0:
            return TransferRefused(f"{blocks} blocks from block {first_block} on are nothing to reserve")
        if sum(one.own is own for one in self._live.values()) >= self._policy.live_max:
            return TransferRefused(f"too many at once: {self._policy.live_max} reservations are live")
        need = blocks * own.block_bytes
        if need > (free := self._policy.bytes_max - self.bytes):
            return TransferRefused(f"no room: {need} bytes wanted, {free} free")
        try:
            so_far = packed(tokens)
        except (OverflowError, TypeError):
            return TransferRefused("the tokens are no token ids")
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
        """Let the source in. A reservation has one source, and that one comes once."""
        found = self._open(message.ticket, now_s)
        if isinstance(found, TransferRefused):
            return found
        if message.version != VERSION:
            return TransferRefused(f"version {message.version} of the transfer is not known here")
        if differs := found.own.difference(message.description):
            return TransferRefused(f"another model: {differs}")
        if found.opened:
            return TransferRefused("this reservation has a source already")
        found.opened = True
        return found

    def check(self, ticket: str, chunk: KvChunk, now_s: float) -> bool | TransferRefused:
        """Say whether a chunk is wanted: False for a repetition, which changes nothing."""
        found = self._open(ticket, now_s)
        if isinstance(found, TransferRefused):
            return found
        if chunk.ticket != ticket:
            return TransferRefused(f"chunk {chunk.number} belongs to another ticket")
        if found.coverage.repeated(chunk):
            return False
        objection = found.coverage.objection(chunk)
        return TransferRefused(objection) if objection else True

    def mark(self, ticket: str, chunk: KvChunk, xxh3: int, now_s: float) -> TransferRefused | None:
        """Note a wanted chunk whose bytes in the region have this xxh3-64."""
        wanted = self.check(ticket, chunk, now_s)
        if isinstance(wanted, TransferRefused):
            return wanted
        if wanted and xxh3 != chunk.xxh3:
            return TransferRefused(f"chunk {chunk.number} is damaged: its checksum differs")
        if wanted:
            self._live[ticket].coverage.mark(chunk)
        return None

    def commit(self, ticket: str, ending: Ending, now_s: float) -> KvReservation | TransferRefused:
        """Settle a reservation: all its bytes are there, and both sides mean the same tokens."""
        found = self._open(ticket, now_s)
        if isinstance(found, TransferRefused):
            return found
        if objection := self._objection(found, ending):
            return TransferRefused(objection)
        found.ending = ending
        return found

    def _objection(self, one: KvReservation, ending: Ending) -> str:
        if ending.ticket != one.ticket:
            return "the ending belongs to another ticket"
        if ending.count * 4 != len(ending.tokens) or digest(ending.tokens) != ending.digest:
            return "the tokens are not those of their count and digest"
        if ending.count < one.count or digest(ending.tokens[: one.count * 4]) != one.digest:
            return "the tokens do not continue those of the reservation"
        if not 0 < ending.computed <= ending.count:
            return f"the KV of {ending.computed} of {ending.count} tokens is said to be there"
        if len(ending.state) > STATE_BYTES_MAX:
            return f"the state has {len(ending.state)} bytes, more than {STATE_BYTES_MAX}"
        need = one.need(ending.computed)
        if (ending.chunks, need, need) != (one.coverage.count, one.coverage.bytes, one.coverage.prefix):
            arrived = f"{one.coverage.bytes} of {need} bytes, {one.coverage.prefix} of them without a gap"
            return f"not all arrived: {arrived}, in {one.coverage.count} of {ending.chunks} chunks"
        return ""

    def _open(self, ticket: str, now_s: float) -> KvReservation | TransferRefused:
        found = self._live.get(ticket)
        if found is None:
            return TransferRefused("there is no such reservation, or no longer")
        if found.deadline_s <= now_s:
            return TransferRefused("the reservation's time is up")
        if found.ending is not None:
            return TransferRefused("the reservation is committed already")
        return found

    def abort(self, ticket: str) -> KvReservation | None:
        """End a reservation, whatever became of it. Also how an engine says that it has taken the bytes."""
        return self._live.pop(ticket, None)

    def expire(self, now_s: float) -> list[KvReservation]:
        """End the reservations whose time is up, committed ones too."""
        ended = [one for one in self._live.values() if one.deadline_s <= now_s]
        for one in ended:
            del self._live[one.ticket]
        return ended
