"""Continuous batching with chunked prefill over a paged KV cache: plans each engine step.

    waiting ── room ──▶ running ──▶ finished
       ▲                   │
       └──── preempted ────┘   no block left: the newest releases its blocks and is recomputed later; requests that are about to
                               leave are not selected (`TorchTransit`)

Every running sequence with one uncached token decodes in every step. The rest of the step's prompt budget goes to the oldest
sequence that still has a prompt to read, then to the next. A preempted sequence loses no token: it returns with all its
generated tokens and recomputes them. Since re-prefill is exact, the answer does not change.

Pure: no torch, no clock, no thread.
"""

from collections import deque
from dataclasses import dataclass, field

from events.wire import Generate
from workers.engines.engine import MOVES_MAX
from workers.engines.transformers.blocks import Blocks
from workers.engines.transformers.sequence import SequenceWork, TorchSequence


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
    """The requests that leave the engine or arrive, and the blocks that they hold.

    out   running ── hold ──▶ held ── resume ──▶ running          its blocks are pinned until `close`,
             └── end, preempted ──▶ lost ◀── cancel ──┘           and while a copy of them is made
    in    reserve ──▶ reserved ── settle ──▶ running              every block it may need is taken at once
                         └── abort, cancel ──▶ over               they are free when no copy into them is made

    Both keep their slot in the batch, so that a held request resumes at once, and an arrived one starts at once.
    """

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
            left = f"{max(0, free)} of {self._blocks.count} are free"
            return f"overloaded: {needed} KV blocks are needed, {left}"
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


class Schedule:
    """The sequences of one engine, and the plan of its next step."""

    def __init__(self, blocks: Blocks, *, batch_max: int, prefill_tokens_max: int) -> None:
        self.blocks = blocks
        self.waiting: deque[TorchSequence] = deque()
        self.running: list[TorchSequence] = []
        self.transit = TorchTransit(blocks)
        self.preemptions = 0
        self._batch_max = batch_max
        self._batch_limit = batch_max  # slots that may be used now; a sequence that has a slot keeps it
        self._prefill_tokens_max = prefill_tokens_max

    def add(self, sequence: TorchSequence, *, first: bool = False) -> None:
        """Queue a sequence by its priority; `first`: before all others."""
        if first:
            self.waiting.appendleft(sequence)
            return
        place = len(self.waiting)
        while place and self._yields(self.waiting[place - 1], sequence):
            place -= 1
        self.waiting.insert(place, sequence)

    def _yields(self, before: TorchSequence, newcomer: TorchSequence) -> bool:
        """Return whether a waiting sequence lets a newcomer pass: no canary does, and none that has generated tokens."""
        return before.priority > newcomer.priority and not before.canary and not before.generated

    def remove(self, sequence: TorchSequence) -> None:
        """Drop a sequence and free its blocks, unless they are being moved to another worker."""
        self.transit.release(sequence, "it has ended")
        self.transit.held.pop(sequence.key, None)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def depart(self, sequence: TorchSequence) -> TorchDeparture | None:
        """Begin the departure of a decoding sequence."""
        here = sequence in self.running or sequence.key in self.transit.held
        decodes = sequence.uncached == 1 and (sequence.generated or sequence.moved)
        if sequence.canary or not here or not decodes:
            return None
        return self.transit.depart(sequence)

    def hold(self, departure: TorchDeparture) -> None:
        """Remove a sequence from the batch; it keeps its blocks."""
        if not departure.lost and departure.sequence in self.running:
            self.running.remove(departure.sequence)
            self.transit.held[departure.sequence.key] = departure.sequence

    def resume(self, departure: TorchDeparture) -> None:
        """Return a held sequence to the batch."""
        if self.transit.held.pop(departure.sequence.key, None):
            self.running.append(departure.sequence)

    def reserve(self, key: int, request: Generate, room_tokens: int) -> TorchArrival | str:
        """Reserve the blocks for a request that arrives with its KV cache, or return why not."""
        if not self.room:
            return f"overloaded: all {self._batch_max} places of the batch are taken"
        return self.transit.reserve(key, request, room_tokens, self.blocks.free - self._reserved_blocks())

    def settle(self, arrival: TorchArrival, sequence: TorchSequence) -> None:
        """Start an arrived sequence."""
        self.transit.settle(arrival, sequence)
        self.running.append(sequence)

    @property
    def room(self) -> int:
        """Number of free slots in the batch."""
        return max(0, self._batch_max - len(self.running) - self.transit.places)

    def limit_batch(self, share: float) -> None:
        """Run at most this share of the batch at once. Requests that arrive with a KV cache may use all slots."""
        self._batch_limit = max(1, int(self._batch_max * share))

    @property
    def canaries(self) -> int:
        """Number of canaries that run or wait."""
        return sum(sequence.canary for each in (self.running, self.waiting) for sequence in each)

    def plan(self) -> tuple[list[SequenceWork], list[int]]:
        """Return the next step's work, single tokens first, and the blocks newly taken for it, to be cleared."""
        self._admit()
        preempted, taken = self.preemptions, list[int]()
        works: list[SequenceWork] = []
        budget = self._prefill_tokens_max
        for sequence in list(self.running):
            if sequence not in self.running:  # the sequence was just preempted for an older one
                continue
            count = min(sequence.uncached, budget) if sequence.uncached > 1 else 1
            if count == 0 or not self._reserve(sequence, sequence.cached + count, taken):
                continue
            if sequence.uncached > 1:
                budget -= count
            works.append(SequenceWork(sequence, sequence.cached, count))
        works = [work for work in works if work.sequence in self.running]
        # released blocks may have another holder by the time they are cleared
        if self.preemptions > preempted:
            kept = {block for work in works for block in work.sequence.blocks}
            taken = [block for block in taken if block in kept]
        works.sort(key=lambda work: work.count > 1)  # stable
        return works, taken

    def _admit(self) -> None:
        while self.waiting and self.room > self._batch_max - self._batch_limit:
            first = self.waiting[0]
            found = self._found(first)
            held = len(found) - self.blocks.unheld(found)
            if self.blocks.needed(len(first.tokens) + 1) - held > self.blocks.free - self._reserved_blocks():
                return
            self.blocks.share(found)
            first.blocks, first.named = found, len(found)
            first.cached = first.found = len(found) * self.blocks.tokens
            self.running.append(self.waiting.popleft())

    def _found(self, sequence: TorchSequence) -> list[int]:
        """Return the cached blocks of its prefix. At least one token is computed: it gives the logits."""
        if not sequence.shares:
            return []
        names = sequence.names_of((len(sequence.tokens) - 1) // self.blocks.tokens, self.blocks.tokens)
        return self.blocks.find(names, sequence.tokens)

    def computed(self, work: SequenceWork) -> None:
        """Record that a part of a sequence is now in its blocks, and name its full blocks, so that other requests find them."""
        sequence, size = work.sequence, self.blocks.tokens
        sequence.cached = work.start + work.count
        full = sequence.cached // size
        if not sequence.shares or full == sequence.named:
            return
        names = sequence.names_of(full, size)
        for place in range(sequence.named, full):
            tokens = sequence.tokens[place * size : (place + 1) * size]
            parent = names[place - 1] if place else None
            self.blocks.name(sequence.blocks[place], names[place], parent, tokens)
        sequence.named = full

    def _reserved_blocks(self) -> int:
        """Return how many free blocks the running sequences still need for tokens to be generated."""
        return sum(self.blocks.needed(len(s.tokens) + 1) - len(s.blocks) for s in self.running)

    def _reserve(self, sequence: TorchSequence, tokens: int, taken: list[int]) -> bool:
        """Allocate a sequence's blocks for this many tokens; False if it was preempted itself."""
        while len(sequence.blocks) < self.blocks.needed(tokens):
            while not self.blocks.free:
                if self._preempt(sequence) is sequence:
                    return False
            block = self.blocks.take()
            sequence.blocks.append(block)
            taken.append(block)
        return True

    def _preempt(self, needy: TorchSequence) -> TorchSequence:
        """Preempt the newest sequence that is not about to migrate.

        If all are about to migrate, preempt the needy one: the others' blocks are pinned, so preempting them frees nothing.
        """
        staying = (one for one in reversed(self.running) if not self.transit.leaving(one))
        newest = next(staying, needy)
        self.running.remove(newest)
        self.transit.release(newest, "it has been preempted")
        newest.cached = 0
        self.waiting.appendleft(newest)
        self.preemptions += 1
        return newest
