"""The scheduler of one simulated rank, which admits requests and runs forward passes.

    submit ──▶ waiting ──▶ prefill ── prompt computed ──▶ batch ── finish, cancel, error ──▶ gone
                  ▲  a slot, KV blocks, tokens    one chunk a pass │
                  └──────── preempted, when blocks run out ────────┘   `transit`: migrating requests

The scheduler uses no clock and no asyncio. A forward pass is one call of `plan`, then one call of `step`. `plan` admits requests
and returns the work of the pass. `step` generates one token for each sequence of the batch. A preempted sequence keeps its
tokens, and only its prefill is repeated.
"""

from collections import deque
from itertools import chain
from typing import cast

from events.kv import KvEvent
from events.wire import Chunk, Generate, Load
from workers.engines.engine import CANARIES_MAX
from workers.engines.faults import EngineFaults
from workers.engines.simulated.kv_cache import KvManager
from workers.engines.simulated.language import prompt_logprobs
from workers.engines.simulated.sequence import (
    DecodeBatch,
    EngineShape,
    Output,
    SampledSequence,
    SimulatedSequence,
    WaitingQueue,
    next_pass,
    next_passes,
    refusal,
)
from workers.engines.simulated.timing import SimulatedArrival, SimulatedTransit
from workers.engines.simulated.timing import StepPlan as Plan

HIT_RATE_OF = 1000  # number of recently admitted requests over which the hit rate is computed


class Prefill:
    """Admits requests and computes their prompts in chunks. A request enters the batch when its prompt is computed."""

    def __init__(self, shape: EngineShape, kv: KvManager, batch: DecodeBatch) -> None:
        self._shape = shape
        self._kv = kv
        self._batch = batch
        self.trusted = True  # whether blocks get names, so that other requests can find them
        self.begun: dict[int, SimulatedSequence] = {}  # requests with at least one computed chunk
        self.through: list[SimulatedSequence] = []  # sequences that get their first token in the current pass
        self._hits: deque[float] = deque(maxlen=HIT_RATE_OF)

    @property
    def hit_rate(self) -> float:
        """The mean share of a request's tokens that were cached at its admission; 0 before the first admission.

        The mean covers the last 1,000 (HIT_RATE_OF) admissions.
        """
        return sum(self._hits) / len(self._hits) if self._hits else 0.0

    def names(self, sequence: SimulatedSequence) -> bool:
        """Return whether the full blocks of a sequence get names, so that other requests can find the blocks."""
        return self._shape.prefix_caching and self.trusted and not sequence.canary

    def admit(self, sequence: SimulatedSequence, budget: int, *, alone: bool) -> int:
        """Allocate a sequence's blocks and begin its prefill, with a first chunk of at most `budget` tokens.

        Return the number of tokens of the first chunk, or 0 if the sequence must wait. The blocks that the chunk fills are named
        at once, so that a request admitted in the same pass can find them. `alone` means that no other prompt is part of this
        pass.
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
        if kv.used + kv.count_activated(names[:here]) + count - here > kv.total - keep:
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

    def compute_next(self, sequence: SimulatedSequence, budget: int) -> int:
        """Compute the next chunk of a prompt, of at most `budget` tokens. Return the number of the chunk's tokens."""
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


class Scheduler:
    """Schedules the requests of one rank, and runs forward passes over them."""

    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape
        # number of slots that new requests may fill; a request with a slot keeps it
        self.batch_limit = shape.batch_max
        self.kv = KvManager(
            shape.kv_blocks, shape.evictor, host_blocks=shape.host_kv_blocks, disk_blocks=shape.disk_kv_blocks
        )
        self.faults = EngineFaults()
        self.planned = Plan()  # the latest plan
        self.batch = DecodeBatch(shape.block_tokens)
        self.prefill = Prefill(shape, self.kv, self.batch)
        self.waiting = WaitingQueue()
        # keys of canaries; those that have ended are dropped when the canaries are counted
        self.canaries: set[int] = set()
        self.transit = SimulatedTransit(shape, self.kv, self.batch, self.prefill.begun)
        self.preemptions = 0  # number of preemptions so far

    # --- requests

    def submit(self, key: int, request: Generate) -> Chunk | None:
        """Put a request into the waiting queue and return None. If the request cannot be accepted, return its final chunk."""
        if against := refusal(request, self.shape) or self.overload(canary=request.canary):
            return Chunk(request.stream, [], error=against)
        sampling, prompt = request.sampling, len(request.tokens)
        if min(sampling.max_tokens, self.shape.context_tokens - prompt) <= 0:
            return Chunk(request.stream, [], finish="length")
        if request.canary:
            self.canaries.add(key)
        sequence = SampledSequence(key, request, self.shape)
        if sampling.prompt_logprobs is not None:
            eos, drift = not sampling.ignore_eos, self.faults.drift
            sequence.before = prompt_logprobs(
                self.shape.weights(request.adapter),
                request.tokens,
                sampling.prompt_logprobs,
                eos=eos,
                drift=drift,
            )
        self.waiting.add(sequence)
        return None

    def reserve(self, key: int, request: Generate, room_tokens: int) -> SimulatedArrival | str:
        """Reserve KV blocks for a request that arrives with its KV cache, or return the reason for a refusal.

        `room_tokens` is the largest number of tokens that the request can have when it arrives.
        """
        return refusal(request, self.shape) or self.transit.reserve(key, request, room_tokens)

    def cancel(self, key: int) -> None:
        """Drop a request and its blocks, and end its move to or from another worker. Unknown keys are ignored."""
        if key in self.batch.sequences:
            self.transit.release(self.batch.leave(key), "it has been cancelled")
            self.prefill.through = [one for one in self.prefill.through if one.key != key]
        elif sequence := self.prefill.begun.pop(key, None):
            self.transit.release(sequence, "it has been cancelled")
        else:
            self.waiting.remove(key)
        self.transit.cancel(key)

    def drop_all(self) -> None:
        """Drop all requests, and end all moves of requests from and to other workers."""
        self.transit.drop_all()
        for key in [*self.batch.sequences, *self.prefill.begun]:
            self.cancel(key)
        self.waiting.clear()

    def trust(self, trusted: bool) -> None:
        """Stop the reuse of all blocks computed so far.

        If not `trusted`, later blocks are not reused either, until a call with `trusted` true.
        """
        self.prefill.trusted = self.transit.trusted = trusted
        renamed = self.kv.forget()
        for sequence in [*self.batch.sequences.values(), *self.prefill.begun.values()]:
            sequence.forget(renamed)
        self.transit.forget(renamed)

    # --- reports

    @property
    def busy(self) -> bool:
        """Whether a request waits, is in prefill or decodes."""
        return bool(self.batch.sequences or self.waiting or self.prefill.begun)

    def load(self) -> Load:
        """Return the numbers of running and waiting requests, used blocks, tokens and canaries."""
        active, running = self.batch.tokens, len(self.batch)
        for one in chain(self.prefill.begun.values(), self.transit.held.values()):
            active, running = active + one.length, running + 1
        return Load(running, len(self.waiting), self.kv.used, self.kv.total, active, self._living_canaries())

    def take_events(self) -> list[KvEvent]:
        """Return the KV events since the last call, in order.

        KV events are recorded only while the worker publishes them (`kv.heard`). Otherwise, the list is empty.
        """
        return self.kv.take_events()

    # --- one pass

    def plan(self) -> Plan:
        """Admit waiting requests in the order of the queue, and return the work of the next pass.

        The caller must then call `step`, unless the plan is idle.
        """
        self.planned = plan = self._plan()
        return plan

    def _plan(self) -> Plan:
        decodes, context = len(self.batch), self.batch.tokens
        if not self.waiting and not self.prefill.begun:
            return Plan(0, decodes, (), self.kv.used, self.kv.total, context, self.kv.take_traffic())
        chunks: list[int] = []
        starts: list[int] = []
        budget = self.shape.prefill_tokens_max - decodes
        for sequence in list(self.prefill.begun.values()):
            if budget <= 0:
                break
            chunks.append(self.prefill.compute_next(sequence, budget))
            starts.append(sequence.computed - chunks[-1])
            budget -= chunks[-1]
        later = len(chunks)
        while self.waiting and self.seats() < self.batch_limit and budget > 0:
            first = self.waiting.first
            chunk = self.prefill.admit(first, budget, alone=not chunks)
            if not chunk:
                break
            self.waiting.remove(first.key)
            chunks.append(chunk)
            starts.append(first.computed - chunk)
            budget -= chunk
        used, traffic = self.kv.used, self.kv.take_traffic()
        total = self.kv.total
        return Plan(sum(chunks), decodes, tuple(chunks), used, total, context, traffic, tuple(starts), later)

    def overload(self, *, canary: bool) -> str | None:
        """Return the error for a new request if the batch and the queue are full, or None if the request can be accepted.

        Canaries do not count against the limit. Up to CANARIES_MAX (2) canaries are accepted even at the limit, so that a full
        worker is checked, too.
        """
        canaries, waiting = self._living_canaries(), len(self.waiting)
        full = self.seats() + waiting - canaries >= self.shape.batch_max + self.shape.waiting_max
        if not full or (canary and canaries < CANARIES_MAX):
            return None
        return f"overloaded: {waiting} requests are waiting already"

    def _living_canaries(self) -> int:
        if self.canaries:
            here = (self.waiting, self.batch.sequences, self.prefill.begun)
            self.canaries = {key for key in self.canaries if any(key in place for place in here)}
        return len(self.canaries)

    def seats(self) -> int:
        """Return the number of batch slots in use or reserved."""
        return len(self.batch) + len(self.prefill.begun) + self.transit.places

    def step(self) -> Output:
        """Generate one token for each sequence of the batch, and return the output of all sequences."""
        if self.faults.error:
            return self._raise()
        batch, due = self.batch, self.batch.due()
        gone = [one for one in due if one.last]
        out = self.generate(gone)
        self.prefill.through.clear()
        batch.passes += 1
        for sequence in gone:
            self._name_full(sequence)
            self.transit.release(batch.leave(sequence.key), "it has ended")
        for sequence in due:
            if sequence.batch is batch:
                self._name_full(sequence)
                self._extend(sequence)
        return out

    def generate(self, gone: list[SimulatedSequence]) -> Output:
        """Generate one token for each sequence of the batch, and return the output of all sequences.

        The caller passes in `gone` the sequences that reach their maximum length in this pass. Sequences that end in this pass
        before their maximum length are appended to `gone`.
        """
        for sequence in chain(gone, self.prefill.through):
            cast(SampledSequence, sequence).quick = False
        sequences = cast(dict[int, SampledSequence], self.batch.sequences)
        out, stopped = next_pass(sequences, self.batch.passes + 1, self.faults)
        gone += stopped
        return out

    def rush(self, tokens: int) -> Output:
        """Run several passes at once: plain passes with up to `tokens` tokens in total, then one more pass.

        A plain pass only generates a token for each sequence. `plan` must have been called before. Return the output of all these
        passes, with one chunk per sequence.
        """
        said = self._take_plain(tokens)
        out = self.step()
        if said:
            for (_, chunk), before in zip(out, said, strict=True):
                chunk.tokens = before + chunk.tokens
        return out

    def _take_plain(self, tokens: int) -> list[list[int]]:
        """Run plain passes with up to `tokens` tokens in total, then plan the next pass.

        A plain pass only generates a token for each sequence. Return the list of tokens of each sequence in the batch, or an
        empty list if no plain pass was possible.
        """
        spoken = cast(list[SampledSequence], list(self.batch.sequences.values()))
        if not spoken or not self._alone() or not all(sequence.quick for sequence in spoken):
            return []
        passes = min(tokens // len(spoken), min(sequence.end - sequence.length for sequence in spoken) - 1)
        blocks = len(spoken) * (passes // self.shape.block_tokens + 1)  # the maximum that these passes need
        if passes <= 0 or self.kv.used + blocks > self.kv.total:
            return []
        said = next_passes(spoken, passes)
        if not said[0]:
            return []
        self._pass(len(said[0]))
        self.plan()
        return said

    def _pass(self, left: int) -> None:
        """Advance the batch's pass count and blocks by `left` passes, after the tokens of these passes were generated.

        In these passes, blocks may become full, but no sequence enters or leaves the batch.
        """
        batch = self.batch
        while left > (ahead := batch.ahead()):
            batch.passes += ahead
            full = batch.due()
            batch.passes += 1
            left -= ahead + 1
            for sequence in full:
                self._name_full(sequence)
                self._extend(sequence)
        batch.passes += left

    def _alone(self) -> bool:
        """Return whether the next pass does nothing but decode.

        This requires that no request waits, is in prefill, or moves to or from another worker. The rank must also have no slower
        KV tiers and no active faults.
        """
        prefill = self.prefill
        if self.waiting or prefill.begun or prefill.through or self.kv.slow is not None:
            return False
        return self.transit.empty and self.faults.healthy

    def _raise(self) -> Output:
        running = [*self.batch.sequences.values(), *self.prefill.begun.values()]
        where = f" of rank {self.faults.raising_rank}" if self.shape.tp > 1 else ""
        error, out = f"engine_error: a rehearsed exception in the forward pass{where}", []
        for sequence in running[: self.faults.raised(len(running))]:
            self.cancel(sequence.key)
            out.append((sequence.key, Chunk(0, [], error=error)))
        return out

    # --- blocks of decoding sequences, as they fill

    def _name_full(self, sequence: SimulatedSequence) -> None:
        """Name the last block of a sequence if the KV of all tokens in the block is computed.

        The KV of the token that was generated last is not computed yet.
        """
        size, blocks = self.shape.block_tokens, sequence.blocks
        if sequence.named and blocks[-1] < 0 and not (sequence.length - 1) % size:
            parent = sequence.names[-1] if sequence.names else None
            name = sequence.name_next(size)
            self.kv.promote(blocks[-1], name, parent)
            blocks[-1] = name

    def _extend(self, sequence: SimulatedSequence) -> None:
        """Allocate a sequence's next block. If no block is free, preempt requests until one is free.

        Requests that are about to move to another worker are not preempted, because their blocks are pinned and would not become
        free. If all requests are about to move, preempt `sequence` itself.
        """
        while sequence.batch is not None:
            if partial := self.kv.take():
                sequence.blocks.append(partial)
                self.batch.schedule(sequence)
                return
            self._preempt(self._victim() or sequence)

    def _victim(self) -> SimulatedSequence | None:
        """Return the sequence to preempt next, or None if all are about to move to another worker.

        By default, this is the newest sequence that is not about to move, as in real engines. `EngineShape.preemption` can select
        the oldest instead.
        """
        running = self.batch.sequences.values()
        late = self.prefill.begun.values()
        newest = self.shape.preemption == "newest"
        order = chain(reversed(late), reversed(running)) if newest else chain(running, late)
        return next((one for one in order if not self.transit.leaving(one.key)), None)

    def _preempt(self, sequence: SimulatedSequence) -> None:
        if sequence.batch is not None:
            self.batch.leave(sequence.key)
        else:
            del self.prefill.begun[sequence.key]
        self.transit.release(sequence, "it has been preempted")
        self.waiting.put_back(sequence)
        self.preemptions += 1
