"""The requests that leave the engine or arrive, and the blocks that they hold. No torch, no thread.

    out   running ── hold ──▶ held ── resume ──▶ running          its blocks are pinned until `close`,
             └── end, preempted ──▶ lost ◀── cancel ──┘           and while a copy of them is made
    in    reserve ──▶ reserved ── settle ──▶ running              every block it may need is taken at once
                         └── abort, cancel ──▶ over               they are free when no copy into them is made

Both keep their slot in the batch, so that a held request resumes at once, and an arrived one starts at once.
"""

from dataclasses import dataclass, field

from events.wire import Generate
from workers.engines.engine import MOVES_MAX
from workers.engines.transformers.blocks import Blocks
from workers.engines.transformers.sequence import TorchSequence


@dataclass(slots=True, eq=False)
class TorchDeparture:
    """A request that may move to another worker."""

    sequence: TorchSequence
    lost: str = ""  # the reason why the request cannot move any more
    closed: bool = False
    copies: int = 0  # in progress
    pinned: list[int] = field(default_factory=list)  # blocks that the request itself no longer holds


@dataclass(slots=True, eq=False)
class TorchArrival:
    """The reservation for an arriving request."""

    key: int
    request: Generate
    room_tokens: int
    blocks: list[int]
    taken: set[int] = field(default_factory=set)  # indexes of arrived blocks in the sequence
    copies: int = 0  # in progress
    over: str = ""  # the reason why no more blocks can arrive


class TorchTransit:
    """The requests that leave or arrive."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._out: dict[int, TorchDeparture] = {}
        self._in: dict[int, TorchArrival] = {}
        self.held: dict[int, TorchSequence] = {}

    @property
    def places(self) -> int:
        """Number of batch slots that are reserved for held and for arriving requests."""
        return len(self.held) + len(self._in)

    @property
    def empty(self) -> bool:
        """Whether no request is leaving or arriving."""
        return not (self._out or self._in or self.held)

    def leaving(self, sequence: TorchSequence) -> bool:
        """Whether a request may still move to another worker."""
        return (found := self._out.get(sequence.key)) is not None and not found.lost

    def depart(self, sequence: TorchSequence) -> TorchDeparture | None:
        """Begin a request's departure, unless it has begun already or too many others have."""
        if sequence.key in self._out or len(self._out) >= MOVES_MAX:
            return None
        self._out[sequence.key] = made = TorchDeparture(sequence)
        return made

    def release(self, sequence: TorchSequence, why: str) -> None:
        """Free the blocks of a request that has ended or is preempted. If it is departing, its departure keeps them."""
        departure = self._out.get(sequence.key)
        if departure is None or departure.pinned:
            self._blocks.give_back(sequence.blocks)
            return
        departure.lost = departure.lost or why
        departure.pinned, sequence.blocks = sequence.blocks, []
        self._settle_out(departure)

    def close(self, departure: TorchDeparture, why: str) -> None:
        """Release the blocks."""
        departure.lost, departure.closed = departure.lost or why, True
        self._settle_out(departure)

    def copied_out(self, departure: TorchDeparture) -> None:
        """Record that a copy has ended."""
        departure.copies -= 1
        self._settle_out(departure)

    def reserve(self, key: int, request: Generate, room_tokens: int, free: int) -> TorchArrival | str:
        """Reserve the blocks for a request that will have grown to `room_tokens` tokens, or return why not."""
        needed = self._blocks.needed(room_tokens)
        if len(self._in) >= MOVES_MAX:
            return f"overloaded: {MOVES_MAX} requests are on their way here already"
        if needed > free:
            return (
                f"overloaded: {needed} KV blocks are needed, {max(0, free)} of {self._blocks.count} are free"
            )
        blocks = [self._blocks.take() for _ in range(needed)]
        self._in[key] = made = TorchArrival(key, request, room_tokens, blocks)
        return made

    def copied_in(self, arrival: TorchArrival, places: range) -> None:
        """Record that a copy into the reserved blocks has ended."""
        arrival.copies -= 1
        arrival.taken.update(places)
        self._settle_in(arrival)

    def settle(self, arrival: TorchArrival, sequence: TorchSequence) -> None:
        """Assign an arrived request its blocks, and free surplus ones."""
        del self._in[arrival.key]
        sequence.blocks = arrival.blocks[: self._blocks.needed(sequence.cached)]
        surplus = arrival.blocks[len(sequence.blocks) :]
        arrival.blocks = []
        self._blocks.give_back(surplus)

    def abort(self, arrival: TorchArrival, why: str) -> None:
        """Free the reservation of a request that does not arrive."""
        if not arrival.over:
            arrival.over = why
            del self._in[arrival.key]
            self._settle_in(arrival)

    def cancel(self, key: int, why: str) -> None:
        """Free the resources reserved for a key, in any state of the move. The schedule drops running and held requests."""
        if departure := self._out.get(key):
            self.close(departure, why)
        if arrival := self._in.get(key):
            self.abort(arrival, why)

    def drop_all(self, why: str) -> None:
        """Free everything."""
        for key in [*self._out, *self._in]:
            self.cancel(key, why)

    def _settle_out(self, departure: TorchDeparture) -> None:
        if not departure.closed or departure.copies:
            return
        self._blocks.give_back(departure.pinned)
        if self._out.get(departure.sequence.key) is departure:
            del self._out[departure.sequence.key]

    def _settle_in(self, arrival: TorchArrival) -> None:
        if arrival.over and not arrival.copies and self._in.get(arrival.key) is not arrival:
            self._blocks.give_back(arrival.blocks)
