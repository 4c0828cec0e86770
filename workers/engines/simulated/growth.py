"""Who gets the next KV block when one is full, and who gives way where there is none?"""

from itertools import chain

from workers.engines.simulated.batch import DecodeBatch
from workers.engines.simulated.kv.kv_manager import KvManager
from workers.engines.simulated.prefill import Prefill
from workers.engines.simulated.sequence import EngineShape, SimulatedSequence
from workers.engines.simulated.transit import SimulatedTransit
from workers.engines.simulated.waiting import WaitingQueue


class BlockGrowth:
    """The blocks of the sequences that decode, as they fill. All but the shape is the scheduler's own."""

    def __init__(
        self,
        shape: EngineShape,
        kv: KvManager,
        batch: DecodeBatch,
        prefill: Prefill,
        transit: SimulatedTransit,
        waiting: WaitingQueue,
    ) -> None:
        self.preemptions = 0
        self._shape = shape
        self._kv = kv
        self._batch = batch
        self._prefill = prefill
        self._transit = transit
        self._waiting = waiting

    def name_full(self, sequence: SimulatedSequence) -> None:
        """Name the last block of a sequence if all its tokens have been computed: the last one said has not been."""
        size, blocks = self._shape.block_tokens, sequence.blocks
        if sequence.named and blocks[-1] < 0 and not (sequence.length - 1) % size:
            parent = sequence.names[-1] if sequence.names else None
            name = sequence.name_next(size)
            self._kv.promote(blocks[-1], name, parent)
            blocks[-1] = name

    def extend(self, sequence: SimulatedSequence) -> None:
        """Give a sequence its next block; where there is none, somebody goes back to waiting. Those that are about to leave
        stay: where all are, this one goes, because the others' blocks are pinned and nobody would gain by theirs."""
        while sequence.batch is not None:
            if partial := self._kv.take():
                sequence.blocks.append(partial)
                self._batch.look(sequence)
                return
            self._preempt(self._victim() or sequence)

    def _victim(self) -> SimulatedSequence | None:
        """Return who is preempted next: by default the newest, as real engines do."""
        running = self._batch.sequences.values()
        late = self._prefill.begun.values()
        newest = self._shape.preemption == "newest"
        order = chain(reversed(late), reversed(running)) if newest else chain(running, late)
        return next((one for one in order if not self._transit.leaving(one.key)), None)

    def _preempt(self, sequence: SimulatedSequence) -> None:
        if sequence.batch is not None:
            self._batch.leave(sequence.key)
        else:
            del self._prefill.begun[sequence.key]
        self._transit.release(sequence, "it has been preempted")
        self._waiting.put_back(sequence)
        self.preemptions += 1
