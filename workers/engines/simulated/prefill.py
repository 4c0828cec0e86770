"""Who is admitted, and how is a prompt computed, a chunk a pass? No clock, no asyncio."""

from collections import deque

from workers.engines.simulated.batch import DecodeBatch
from workers.engines.simulated.kv.kv_manager import KvManager
from workers.engines.simulated.sequence import EngineShape, SimulatedSequence

HIT_RATE_OF = 1000  # requests admitted last


class Prefill:
    """The requests whose prompts are being computed. Who is through enters the batch."""

    def __init__(self, shape: EngineShape, kv: KvManager, batch: DecodeBatch) -> None:
        self._shape = shape
        self._kv = kv
        self._batch = batch
        self.trusted = True  # blocks get names, so that others can find them
        self.begun: dict[int, SimulatedSequence] = {}  # a chunk of each of them has been computed
        self.through: list[SimulatedSequence] = []  # those that say their first token in the present pass
        self._hits: deque[float] = deque(maxlen=HIT_RATE_OF)

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that the requests admitted last found in the prefix cache."""
        return sum(self._hits) / len(self._hits) if self._hits else 0.0

    def names(self, sequence: SimulatedSequence) -> bool:
        """Whether a sequence's full blocks get names, so that others can find them."""
        return self._shape.prefix_caching and self.trusted and not sequence.canary

    def admit(self, sequence: SimulatedSequence, budget: int, *, alone: bool) -> int:
        """Take a sequence's blocks and begin its prefill; return the tokens of its first chunk, 0 if it must wait.

        The blocks that the chunk fills have their names from now on: whoever is admitted in the same pass finds them.
        `alone`: nobody else's prompt is part of this pass.
        """
        shape, kv = self._shape, self._kv
        length, size = sequence.length, shape.block_tokens
        sequence.named = self.names(sequence)
        names = sequence.name_blocks(size) if sequence.named else []
        here = kv.cached(names)
        found = here + kv.fetchable(names[here:])
        cached = min(found * size, length - 1)
        left, count = length - cached, -(-length // size)
        if not shape.chunked_prefill and not alone and left > budget:
            return 0
        keep = int(shape.watermark * kv.total) if kv.used else 0
        if kv.used + kv.wanted(names[:here]) + count - here > kv.total - keep:
            return 0
        chunk = min(left, budget) if shape.chunked_prefill else left
        full = min((cached + chunk) // size, len(names))
        kv.fetch(names[here:found])
        blocks = names[:full] + kv.partials(count - full)
        taken = kv.use(blocks)
        assert taken, "the room was counted before"
        self._hits.append(cached / length)
        sequence.blocks, sequence.cached, sequence.computed = blocks, cached, cached + chunk
        sequence.fresh = True
        self._put(sequence)
        return chunk

    def go_on(self, sequence: SimulatedSequence, budget: int) -> int:
        """Compute the next chunk of a prompt; return its tokens."""
        size, before = self._shape.block_tokens, sequence.computed
        chunk = min(sequence.length - before, budget)
        sequence.computed = before + chunk
        first, last = before // size, sequence.computed // size
        if sequence.named and first < last:
            names, blocks = sequence.names, sequence.blocks
            parent = names[first - 1] if first else None
            self._kv.promote_all(blocks[first:last], names[first:last], parent)
            blocks[first:last] = names[first:last]
        self._put(sequence)
        return chunk

    def _put(self, sequence: SimulatedSequence) -> None:
        if sequence.computed < sequence.length:
            self.begun[sequence.key] = sequence
            return
        self.begun.pop(sequence.key, None)
        self.through.append(sequence)
        self._batch.enter(sequence)
