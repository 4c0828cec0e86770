"""Plans each engine step: continuous batching with chunked prefill over a paged KV cache.

    waiting ── free slot and blocks ──▶ running ──▶ finished
       ▲                                   │
       └──────────── preempted ────────────┘   when no block is free

A token is uncached while its KV is not computed. Every running sequence with one uncached token decodes in every step. The step's
budget of prompt tokens goes to the running sequences with several uncached tokens, the oldest first. If no block is free, the
newest sequence is preempted. That sequence releases its blocks and later recomputes all its tokens, including the generated ones.
So a preempted sequence loses no token, and because the repeated prefill is exact, the answer does not change. Sequences that are
about to move to another worker (`TorchTransit`) are not preempted.

This module uses no torch, no clock and no thread.
"""

from collections import deque
from dataclasses import dataclass, field

from events.wire import Generate
from workers.engines.engine import MOVES_MAX
from workers.engines.transformers.blocks import Blocks
from workers.engines.transformers.sequence import SequenceWork, TorchSequence


@dataclass(slots=True, eq=False)
class TorchDeparture:
    """A request that is moving to another worker, or is prepared for such a move."""

    sequence: TorchSequence
    lost: str = ""  # the reason why the request cannot move any more; empty: it can
    closed: bool = False
    copies: int = 0  # number of copies of blocks in progress
    # blocks kept for this departure after the request has released them
    pinned: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class TorchArrival:
    """The reservation of blocks and of a batch slot for an arriving request."""

    key: int
    request: Generate
    room_tokens: int  # number of tokens for which blocks are reserved
    blocks: list[int]  # the reserved blocks
    taken: set[int] = field(default_factory=set)  # indexes in the sequence of the blocks that have arrived
    copies: int = 0  # number of copies into the blocks in progress
    over: str = ""  # the reason why no more blocks can arrive; empty: they can


class TorchTransit:
    """Tracks the requests that move to or from other workers, and the KV blocks of these requests.

    out   running ── hold ──▶ held ── resume ──▶ running          the blocks are pinned until `close` was called
             └── end, preempted ──▶ lost ◀── cancel ──┘           and no copy of them is in progress
    in    reserve ──▶ reserved ── settle ──▶ running              all blocks that the request may need are reserved at once
                         └── abort, cancel ──▶ over               the blocks become free when no copy into them is in progress

    Held and arriving requests keep a slot of the batch, so that a held request can resume at once, and an arrived one can start
    at once.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._out: dict[int, TorchDeparture] = {}
        self._in: dict[int, TorchArrival] = {}
        self.held: dict[int, TorchSequence] = {}

    @property
    def places(self) -> int:
        """Number of batch slots that are reserved: for arriving requests, and for requests stopped in order to move."""
        return len(self.held) + len(self._in)

    @property
    def empty(self) -> bool:
        """Whether no request moves to or from another worker, or is prepared to move."""
        return not (self._out or self._in or self.held)

    def leaving(self, sequence: TorchSequence) -> bool:
        """Return whether a move of the request to another worker is prepared or under way, and can still succeed."""
        return (found := self._out.get(sequence.key)) is not None and not found.lost

    def depart(self, sequence: TorchSequence) -> TorchDeparture | None:
        """Prepare a request's move to another worker, and return the object that tracks the move.

        Return None if the request is already prepared to move, or if MOVES_MAX (16) requests are.
        """
        if sequence.key in self._out or len(self._out) >= MOVES_MAX:
            return None
        self._out[sequence.key] = made = TorchDeparture(sequence)
        return made

    def release(self, sequence: TorchSequence, why: str) -> None:
        """Release the blocks of a request that has ended or is preempted, for the reason `why`.

        If the request is moving to another worker, the move fails, and the blocks are only released when the move is closed.
        """
        departure = self._out.get(sequence.key)
        if departure is None or departure.pinned:
            self._blocks.give_back(sequence.blocks)
            return
        departure.lost = departure.lost or why
        departure.pinned, sequence.blocks = sequence.blocks, []
        self._settle_out(departure)

    def close(self, departure: TorchDeparture, why: str) -> None:
        """End a request's move to another worker.

        Blocks kept for the move become free when no copy of them is in progress.
        """
        departure.lost, departure.closed = departure.lost or why, True
        self._settle_out(departure)

    def copied_out(self, departure: TorchDeparture) -> None:
        """Record that a copy of blocks to another worker has ended."""
        departure.copies -= 1
        self._settle_out(departure)

    def reserve(self, key: int, request: Generate, room_tokens: int, free: int) -> TorchArrival | str:
        """Reserve KV blocks for a request of up to `room_tokens` tokens, or return the reason for a refusal.

        `free` is the number of blocks that this reservation may use.
        """
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
        """Record that a copy into the reserved blocks has ended. `places` are the blocks' indexes; empty: the copy failed."""
        arrival.copies -= 1
        arrival.taken.update(places)
        self._settle_in(arrival)

    def settle(self, arrival: TorchArrival, sequence: TorchSequence) -> None:
        """Assign the reserved blocks to the arrived request, and free those that the request does not need yet."""
        del self._in[arrival.key]
        sequence.blocks = arrival.blocks[: self._blocks.needed(sequence.cached)]
        surplus = arrival.blocks[len(sequence.blocks) :]
        arrival.blocks = []
        self._blocks.give_back(surplus)

    def abort(self, arrival: TorchArrival, why: str) -> None:
        """Cancel the reservation of a request that will not arrive. Has no effect on a reservation that has ended."""
        if not arrival.over:
            arrival.over = why
            del self._in[arrival.key]
            self._settle_in(arrival)

    def cancel(self, key: int, why: str) -> None:
        """End a request's move to or from another worker, and free what was reserved for the move.

        This does not drop the request itself. If it runs or is stopped for the move, `Schedule.remove` drops it.
        """
        if departure := self._out.get(key):
            self.close(departure, why)
        if arrival := self._in.get(key):
            self.abort(arrival, why)

    def drop_all(self, why: str) -> None:
        """End all moves, for the reason `why`."""
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
    """Keeps the sequences of one engine, and plans its steps."""

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
        """Put a sequence into the waiting queue by its priority. If `first`, put it before all others."""
        if first:
            self.waiting.appendleft(sequence)
            return
        place = len(self.waiting)
        while place and self._yields(self.waiting[place - 1], sequence):
            place -= 1
        self.waiting.insert(place, sequence)

    def _yields(self, before: TorchSequence, newcomer: TorchSequence) -> bool:
        """Return whether the new sequence `newcomer` is queued ahead of the waiting sequence `before`.

        This is so if `newcomer` is more urgent, and if `before` is no canary and has generated no tokens yet.
        """
        return before.priority > newcomer.priority and not before.canary and not before.generated

    def remove(self, sequence: TorchSequence) -> None:
        """Drop a sequence and release its blocks. Blocks that are being copied to another worker are freed after the copy."""
        self.transit.release(sequence, "it has ended")
        self.transit.held.pop(sequence.key, None)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def depart(self, sequence: TorchSequence) -> TorchDeparture | None:
        """Prepare a sequence's move to another worker, and return the object that tracks the move.

        Return None if the sequence does not decode, is a canary, or is already prepared to move. Also return None if MOVES_MAX
        (16) sequences are already prepared to move.
        """
        here = sequence in self.running or sequence.key in self.transit.held
        decodes = sequence.uncached == 1 and (sequence.generated or sequence.moved)
        if sequence.canary or not here or not decodes:
            return None
        return self.transit.depart(sequence)

    def hold(self, departure: TorchDeparture) -> None:
        """Stop a sequence that moves to another worker: remove it from the batch. It keeps its blocks and its slot."""
        if not departure.lost and departure.sequence in self.running:
            self.running.remove(departure.sequence)
            self.transit.held[departure.sequence.key] = departure.sequence

    def resume(self, departure: TorchDeparture) -> None:
        """Put a sequence that `hold` has stopped back into the batch. Has no effect on any other sequence."""
        if self.transit.held.pop(departure.sequence.key, None):
            self.running.append(departure.sequence)

    def reserve(self, key: int, request: Generate, room_tokens: int) -> TorchArrival | str:
        """Reserve a slot and KV blocks for a request that arrives with its KV cache, or return why this is refused.

        `room_tokens` is the largest number of tokens that the request can have when it arrives.
        """
        if not self.room:
            return f"overloaded: all {self._batch_max} places of the batch are taken"
        return self.transit.reserve(key, request, room_tokens, self.blocks.free - self._reserved_blocks())

    def settle(self, arrival: TorchArrival, sequence: TorchSequence) -> None:
        """Add an arrived sequence to the running batch, with the blocks of its reservation."""
        self.transit.settle(arrival, sequence)
        self.running.append(sequence)

    @property
    def room(self) -> int:
        """Number of free slots in the batch."""
        return max(0, self._batch_max - len(self.running) - self.transit.places)

    def limit_batch(self, share: float) -> None:
        """Limit the running batch to this share of its full size. Requests that arrive with a KV cache may use all slots."""
        self._batch_limit = max(1, int(self._batch_max * share))

    @property
    def canaries(self) -> int:
        """Number of canaries that run or wait."""
        return sum(sequence.canary for each in (self.running, self.waiting) for sequence in each)

    def plan(self) -> tuple[list[SequenceWork], list[int]]:
        """Admit waiting sequences and plan the next step.

        Return the work of the step, and the blocks that are newly allocated for it. Work of a single token comes first. The
        caller must clear the new blocks.
        """
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
        # Preemption may have released some of the new blocks. Those that no work of this step holds must not be cleared.
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
        """Return the cached blocks of a sequence's prefix.

        These blocks never cover all tokens, because at least one token must be computed to get the logits.
        """
        if not sequence.shares:
            return []
        names = sequence.names_of((len(sequence.tokens) - 1) // self.blocks.tokens, self.blocks.tokens)
        return self.blocks.find(names, sequence.tokens)

    def computed(self, work: SequenceWork) -> None:
        """Record that the KV of `work` has been computed and is in the sequence's blocks.

        If the sequence shares blocks, name the blocks that are now full, so that other requests can find them.
        """
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
        """Return how many more blocks the running sequences need for their current tokens and one more token each."""
        return sum(self.blocks.needed(len(s.tokens) + 1) - len(s.blocks) for s in self.running)

    def _reserve(self, sequence: TorchSequence, tokens: int, taken: list[int]) -> bool:
        """Allocate a sequence's blocks for this many tokens, and add the new blocks to `taken`.

        If no block is free, preempt sequences. Return False if the sequence itself was preempted.
        """
        while len(sequence.blocks) < self.blocks.needed(tokens):
            while not self.blocks.free:
                if self._preempt(sequence) is sequence:
                    return False
            block = self.blocks.take()
            sequence.blocks.append(block)
            taken.append(block)
        return True

    def _preempt(self, needy: TorchSequence) -> TorchSequence:
        """Preempt the newest sequence that is not about to move to another worker, and return the preempted sequence.

        The blocks of a sequence that is about to move are pinned, so its preemption would free none. If all sequences are about
        to move, preempt `needy`, the sequence that needs a block.
        """
        staying = (one for one in reversed(self.running) if not self.transit.leaving(one))
        newest = next(staying, needy)
        self.running.remove(newest)
        self.transit.release(newest, "it has been preempted")
        newest.cached = 0
        self.waiting.appendleft(newest)
        self.preemptions += 1
        return newest
