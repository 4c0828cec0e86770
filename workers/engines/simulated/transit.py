"""Which requests are on their way out of the engine or into it, and which blocks do they hold? No clock, no asyncio.

    out   running ── hold ──▶ held ── resume, close ──▶ running   its blocks are pinned until `close`,
             └── end, preempted ──▶ lost ◀── cancel ──┘           whatever becomes of the request itself
    in    reserve ──▶ reserved ── settle ──▶ running              every block it may need is taken at once
                         └── abort, cancel ──▶ over

Both keep their place in the batch, so that a held request goes on at once, and one that has come begins at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from events.wire import Generate
from workers.engines.engine import MOVES_MAX
from workers.engines.simulated.kv_cache import KvManager
from workers.engines.simulated.sequence import (
    DecodeBatch,
    EngineShape,
    SimulatedSequence,
    Spoken,
    prefix_names,
)


@dataclass(slots=True, eq=False)
class SimulatedDeparture:
    """A request that may leave."""

    sequence: Spoken
    held: bool = False  # it says nothing more
    lost: str = ""  # why it cannot leave any more
    pinned: list[int] = field(default_factory=list)  # the blocks that the request itself has let go of

    @property
    def computed(self) -> int:
        """Tokens whose KV is in the blocks: the last one said has yet to go through the model."""
        return self.sequence.length - 1


@dataclass(slots=True, eq=False)
class SimulatedArrival:
    """Room for a request that comes."""

    key: int
    request: Generate
    room_tokens: int
    blocks: list[int]
    cached_tokens: int
    # (rank, block) -> what came; None: it was compared already, and is what it must be.
    taken: dict[tuple[int, int], bytes | None] = field(default_factory=dict)
    named: bool = True  # its full blocks will have names
    over: str = ""  # why nothing can come any more


class SimulatedTransit:
    """The requests on their way. `batch` and `prefilling` are the scheduler's own."""

    def __init__(
        self,
        shape: EngineShape,
        kv: KvManager,
        batch: DecodeBatch,
        prefilling: Mapping[int, SimulatedSequence],
    ) -> None:
        self._prefilling = prefilling
        self._shape = shape
        self._kv = kv
        self._batch = batch
        self.trusted = True  # what is here may be found
        self._out: dict[int, SimulatedDeparture] = {}
        self._in: dict[int, SimulatedArrival] = {}
        self.held: dict[int, SimulatedSequence] = {}

    @property
    def places(self) -> int:
        """Places of the batch that are kept for held requests and for those to come."""
        return len(self.held) + len(self._in)

    @property
    def empty(self) -> bool:
        """Whether no request is on its way, out or in."""
        return not (self._out or self._in)

    def leaving(self, key: int) -> bool:
        """Whether a request may still leave."""
        return (found := self._out.get(key)) is not None and not found.lost

    def depart(self, key: int) -> SimulatedDeparture | None:
        """Let a request that decodes begin to leave."""
        sequence = self._batch.sequences.get(key)
        if not isinstance(sequence, Spoken) or sequence.fresh or sequence.canary:
            return None
        if key in self._out or len(self._out) >= MOVES_MAX:
            return None
        self._out[key] = made = SimulatedDeparture(sequence)
        return made

    def hold(self, departure: SimulatedDeparture) -> None:
        """Take a request out of the batch, with its blocks."""
        if not departure.lost and not departure.held:
            departure.held = True
            self.held[departure.sequence.key] = self._batch.leave(departure.sequence.key)

    def resume(self, departure: SimulatedDeparture) -> None:
        """Put a held request back into the batch."""
        if departure.held and not departure.lost:
            departure.held = False
            self._batch.enter(self.held.pop(departure.sequence.key))

    def close(self, departure: SimulatedDeparture) -> None:
        """Let go of the blocks; a request that was held goes on."""
        self.resume(departure)
        departure.lost = departure.lost or "it has been closed"
        self._kv.release(departure.pinned)
        departure.pinned = []
        if self._out.get(departure.sequence.key) is departure:
            del self._out[departure.sequence.key]

    def release(self, sequence: SimulatedSequence, why: str) -> None:
        """Free the blocks of a request that has ended or is preempted, or leave them to its departure."""
        departure = self._out.get(sequence.key)
        if departure is None or departure.lost:
            self._kv.release(sequence.blocks)
        else:
            departure.lost, departure.pinned = why, sequence.blocks
        sequence.blocks = []

    def reserve(self, key: int, request: Generate, room_tokens: int) -> SimulatedArrival | str:
        """Take the blocks for a request that will have grown to so many tokens, or say why not."""
        if request.canary:
            return "a canary does not move"
        if len(self._in) >= MOVES_MAX:
            return f"overloaded: {MOVES_MAX} requests are on their way here already"
        if len(self._batch) + len(self._prefilling) + self.places >= self._shape.batch_max:
            return f"overloaded: all {self._shape.batch_max} places of the batch are taken"
        tokens, size = request.tokens, self._shape.block_tokens
        room_tokens = min(max(room_tokens, len(tokens)), self._shape.context_tokens)
        # The last token is computed here in any case.
        names = prefix_names(tokens[:-1], request, size) if self._names else []
        found = self._kv.cached(names)
        blocks = names[:found] + self._kv.partials(-(-room_tokens // size) - found)
        if not self._kv.use(blocks):
            return f"overloaded: {self._kv.used} of {self._kv.total} KV blocks are in use"
        made = SimulatedArrival(key, request, room_tokens, blocks, found * size, named=self._names)
        self._in[key] = made
        return made

    def settle(self, arrival: SimulatedArrival, tokens: list[int]) -> None:
        """Let a request that has come run. Its blocks are named now, and what it has too many of goes back."""
        sequence = Spoken(arrival.key, arrival.request, self._shape, tokens)
        size, blocks = self._shape.block_tokens, arrival.blocks
        full = (len(tokens) - 1) // size
        sequence.named = arrival.named
        if sequence.named:
            names, found = sequence.name_prefix(size), arrival.cached_tokens // size
            self._kv.promote_all(blocks[found:full], names[found:full], names[found - 1] if found else None)
            blocks[found:full] = names[found:full]
        self._kv.destroy(blocks[full + 1 :])
        sequence.blocks, sequence.fresh = blocks[: full + 1], False
        del self._in[arrival.key]
        arrival.over = "it has been committed"
        self._batch.enter(sequence)

    def forget(self, renamed: Mapping[int, int]) -> None:
        """Continue with blocks that no other request can find."""
        for sequence in self.held.values():
            sequence.forget(renamed)
        for departure in self._out.values():
            departure.pinned = [renamed.get(block, block) for block in departure.pinned]
        for arrival in self._in.values():
            arrival.blocks = [renamed.get(block, block) for block in arrival.blocks]
            arrival.named = False

    @property
    def _names(self) -> bool:
        return self._shape.prefix_caching and self.trusted

    def abort(self, arrival: SimulatedArrival, why: str = "it has been aborted") -> None:
        """Free the room of a request that does not come."""
        if not arrival.over:
            arrival.over = why
            arrival.taken.clear()
            del self._in[arrival.key]
            self._kv.release(arrival.blocks)

    def cancel(self, key: int) -> None:
        """Free what is kept for a key, in whatever state."""
        if sequence := self.held.pop(key, None):
            self.release(sequence, "it has been cancelled")
        if departure := self._out.get(key):
            departure.lost = departure.lost or "it has been cancelled"
            self.close(departure)
        if arrival := self._in.get(key):
            self.abort(arrival, "it has been cancelled")

    def drop_all(self) -> None:
        """Free everything."""
        for key in [*self._out, *self._in]:
            self.cancel(key)
