"""Who runs in the next step, and on how many tokens? Continuous batching with chunked prefill over a paged KV cache.

    waiting ── room ──▶ running ──▶ finished
       ▲                   │
       └──── preempted ────┘   no block left: the newest gives its blocks back and is computed again later, and
                               sooner one that is not about to leave (transit.py)

Every running sequence with one uncached token decodes in every step. What is left of the step's prompt budget goes to
the oldest sequence that still has a prompt to read, then to the next. A preempted sequence loses no token: it comes
back with all it has said and reads that again, and since re-prefill is exact nobody can tell.

Pure: no torch, no clock, no thread.
"""

from collections import deque

from events.wire import Generate
from workers.engines.transformers.blocks import Blocks
from workers.engines.transformers.sequence import SequenceWork, TorchSequence
from workers.engines.transformers.transit import TorchArrival, TorchDeparture, TorchTransit


class Schedule:
    """The sequences of one engine, and the plan of its next step."""

    def __init__(self, blocks: Blocks, *, batch_max: int, prefill_tokens_max: int) -> None:
        self.blocks = blocks
        self.waiting: deque[TorchSequence] = deque()
        self.running: list[TorchSequence] = []
        self.transit = TorchTransit(blocks)
        self.preemptions = 0
        self._batch_max = batch_max
        self._batch_limit = batch_max  # places that may be taken now; who has one keeps it
        self._prefill_tokens_max = prefill_tokens_max

    def add(self, sequence: TorchSequence, *, first: bool = False) -> None:
        """Let a sequence wait for its turn, by its priority; `first`: before all others."""
        if first:
            self.waiting.appendleft(sequence)
            return
        place = len(self.waiting)
        while place and self._yields(self.waiting[place - 1], sequence):
            place -= 1
        self.waiting.insert(place, sequence)

    def _yields(self, before: TorchSequence, newcomer: TorchSequence) -> bool:
        """Say whether one that waits lets a newcomer go first: no canary, and none that has said something."""
        return before.priority > newcomer.priority and not before.canary and not before.generated

    def remove(self, sequence: TorchSequence) -> None:
        """Forget a sequence and free its blocks, unless they are about to leave."""
        self.transit.release(sequence, "it has ended")
        self.transit.held.pop(sequence.key, None)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def depart(self, sequence: TorchSequence) -> TorchDeparture | None:
        """Let a sequence that decodes begin to leave."""
        here = sequence in self.running or sequence.key in self.transit.held
        decodes = sequence.uncached == 1 and (sequence.generated or sequence.moved)
        if sequence.canary or not here or not decodes:
            return None
        return self.transit.depart(sequence)

    def hold(self, departure: TorchDeparture) -> None:
        """Take a sequence out of the batch, with its blocks."""
        if not departure.lost and departure.sequence in self.running:
            self.running.remove(departure.sequence)
            self.transit.held[departure.sequence.key] = departure.sequence

    def resume(self, departure: TorchDeparture) -> None:
        """Put a sequence that was held back into the batch."""
        if self.transit.held.pop(departure.sequence.key, None):
            self.running.append(departure.sequence)

    def reserve(self, key: int, request: Generate, room_tokens: int) -> TorchArrival | str:
        """Take the blocks for a request that comes with its KV cache, or say why not."""
        if not self.room:
            return f"overloaded: all {self._batch_max} places of the batch are taken"
        return self.transit.reserve(key, request, room_tokens, self.blocks.free - self._spoken_for())

    def settle(self, arrival: TorchArrival, sequence: TorchSequence) -> None:
        """Let a sequence that has come run."""
        self.transit.settle(arrival, sequence)
        self.running.append(sequence)

    @property
    def room(self) -> int:
        """Places in the batch that nobody has."""
        return max(0, self._batch_max - len(self.running) - self.transit.places)

    def limit_batch(self, share: float) -> None:
        """Let no more than this share of the batch run at once. Who comes with a KV cache has begun: all places are his."""
        self._batch_limit = max(1, int(self._batch_max * share))

    @property
    def canaries(self) -> int:
        """How many of those that run or wait are canaries."""
        return sum(sequence.canary for each in (self.running, self.waiting) for sequence in each)

    def plan(self) -> tuple[list[SequenceWork], list[int]]:
        """Return the next step's work, single tokens first, and the blocks newly taken for it, to be cleared."""
        self._admit()
        preempted, taken = self.preemptions, list[int]()
        works: list[SequenceWork] = []
        budget = self._prefill_tokens_max
        for sequence in list(self.running):
            if sequence not in self.running:  # preempted for an older one, a moment ago
                continue
            count = min(sequence.uncached, budget) if sequence.uncached > 1 else 1
            if count == 0 or not self._reserve(sequence, sequence.cached + count, taken):
                continue
            if sequence.uncached > 1:
                budget -= count
            works.append(SequenceWork(sequence, sequence.cached, count))
        works = [work for work in works if work.sequence in self.running]
        if self.preemptions > preempted:  # what went back may be somebody else's by the time it is cleared
            kept = {block for work in works for block in work.sequence.blocks}
            taken = [block for block in taken if block in kept]
        works.sort(key=lambda work: work.count > 1)  # stable
        return works, taken

    def _admit(self) -> None:
        while self.waiting and self.room > self._batch_max - self._batch_limit:
            first = self.waiting[0]
            found = self._found(first)
            held = len(found) - self.blocks.unheld(found)
            if self.blocks.needed(len(first.tokens) + 1) - held > self.blocks.free - self._spoken_for():
                return
            self.blocks.share(found)
            first.blocks, first.named = found, len(found)
            first.cached = first.found = len(found) * self.blocks.tokens
            self.running.append(self.waiting.popleft())

    def _found(self, sequence: TorchSequence) -> list[int]:
        """Return the blocks of its beginning that are here. One token at least is computed: it gives the logits."""
        if not sequence.shares:
            return []
        names = sequence.names_of((len(sequence.tokens) - 1) // self.blocks.tokens, self.blocks.tokens)
        return self.blocks.find(names, sequence.tokens)

    def computed(self, work: SequenceWork) -> None:
        """Note that a part of a sequence is in its blocks now, and let others find those that are full."""
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

    def _spoken_for(self) -> int:
        """Return how many free blocks those who run need for what they have said."""
        return sum(self.blocks.needed(len(s.tokens) + 1) - len(s.blocks) for s in self.running)

    def _reserve(self, sequence: TorchSequence, tokens: int, taken: list[int]) -> bool:
        """Give a sequence the blocks for this many tokens; False if it was the one that had to go."""
        while len(sequence.blocks) < self.blocks.needed(tokens):
            while not self.blocks.free:
                if self._preempt(sequence) is sequence:
                    return False
            block = self.blocks.take()
            sequence.blocks.append(block)
            taken.append(block)
        return True

    def _preempt(self, needy: TorchSequence) -> TorchSequence:
        """Preempt the newest that is not about to leave. Where all are, the one in need goes: the others' blocks are
        pinned, so that nobody would gain by theirs."""
        staying = (one for one in reversed(self.running) if not self.transit.leaving(one))
        newest = next(staying, needy)
        self.running.remove(newest)
        self.transit.release(newest, "it has been preempted")
        newest.cached = 0
        self.waiting.appendleft(newest)
        self.preemptions += 1
        return newest
