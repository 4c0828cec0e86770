"""Runs one step of the transformers engine: plan, compute, choose. No thread, no clock.

Once it runs, the engine's thread is the only caller; before that the engine measures itself with the stepper.
"""

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Sequential

import structlog
import xxhash

from events import blocks
from events.kv import KvEvent
from events.observations import Profile
from events.wire import Chunk, Generate, Load, Sampling
from workers.engines.transformers.blocks import Blocks
from workers.engines.transformers.faults import NotFloat32, TorchFaults, WeightFaultInjector, bit_flip
from workers.engines.transformers.model import Model, sampling_rows
from workers.engines.transformers.sampling import SampledToken, choose, read_prompts, unsound
from workers.engines.transformers.schedule import Schedule, TorchArrival, TorchDeparture, TorchTransit
from workers.engines.transformers.sequence import SequenceWork, TorchSequence
from workers.engines.transformers.settings import TransformersSettings

MEASURE_S_MAX = 1.5  # the curve of a profile ends at the point reached when this time is spent
MEASURED_STEPS = 4
MEASURED_PROMPT = 16

log = structlog.get_logger(__name__)

Output = list[tuple[int, Chunk]]


class Stepper:
    """A model, its KV cache, and the requests in it.

    `lock` guards the block tables: moving requests take and free blocks on the worker's loop. It is never held while the model
    computes.
    """

    def __init__(self, model: Model, settings: TransformersSettings) -> None:
        self.model = model
        self.faults = TorchFaults()
        self.blocks = Blocks(settings.kv_tokens // settings.block_tokens, settings.block_tokens)
        self.pool = model.pool(blocks=self.blocks.count, block_tokens=settings.block_tokens)
        self.schedule = Schedule(
            self.blocks, batch_max=settings.batch_max, prefill_tokens_max=settings.prefill_tokens_max
        )
        self.surgeon = WeightFaultInjector(model.parameters())
        self.limit = min(model.context_tokens, self.blocks.count * settings.block_tokens)
        self.lock = threading.RLock()
        self._prefix_caching = settings.prefix_caching
        self._trusted = True
        self._eos = _eos(model)
        self._sequences: dict[int, TorchSequence] = {}

    def __contains__(self, key: int) -> bool:
        """Return whether this request was accepted and has not ended."""
        return key in self._sequences

    @property
    def busy(self) -> bool:
        """Whether there is work."""
        return bool(self._sequences)

    @property
    def transit(self) -> TorchTransit:
        """The requests that leave or arrive."""
        return self.schedule.transit

    def refusal(self, request: Generate) -> str | None:
        """Return why this request cannot be served, or None. Reads only constants: callable from any thread."""
        tokens, sampling, vocabulary = request.tokens, request.sampling, self.model.vocabulary
        if not tokens:
            return "invalid_request: the prompt is empty"
        if len(tokens) >= self.limit:
            return f"invalid_request: {len(tokens)} tokens leave no room in a context of {self.limit}"
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            return f"invalid_request: token ids go from 0 to {vocabulary - 1}"
        if request.guided is not None:
            return "invalid_request: this engine has no guided decoding"
        if any(not 0 <= stop < vocabulary for stop in sampling.stop_token_ids):
            return f"invalid_request: stop token ids go from 0 to {vocabulary - 1}"
        if any(not 0 <= token < vocabulary for token in sampling.logit_bias):
            return f"invalid_request: logit_bias: token ids go from 0 to {vocabulary - 1}"
        return None

    def submit(self, key: int, request: Generate) -> Chunk | None:
        """Accept a request; return its final chunk if it asks for no tokens."""
        sequence = self._sequence(key, request, request.tokens)
        if sequence.left <= 0:
            return Chunk(request.stream, [], finish="length")
        with self.lock:
            self._sequences[key] = sequence
            # a canary that detects a faulty worker must not wait for others
            self.schedule.add(sequence, first=request.canary)
        return None

    def depart(self, key: int) -> TorchDeparture | None:
        """Begin the departure of a decoding request."""
        with self.lock:
            sequence = self._sequences.get(key)
            return None if sequence is None else self.schedule.depart(sequence)

    def reserve(self, key: int, request: Generate, room_tokens: int) -> TorchArrival | str:
        """Reserve the blocks for a request that arrives with its KV cache, or return why not."""
        if request.canary:
            return "a canary does not move"
        with self.lock:
            room = min(max(room_tokens, len(request.tokens)), self.limit)
            return self.schedule.reserve(key, request, room)

    def settle(self, arrival: TorchArrival, tokens: Sequential[int], computed: int) -> None:
        """Start a request that has arrived with its KV cache."""
        sequence = self._sequence(arrival.key, arrival.request, tokens)
        # blocks computed by another worker are used for this request alone
        sequence.moved, sequence.shares = True, False
        sequence.cached = min(computed, len(tokens) - 1)  # the last one gives the logits
        with self.lock:
            self._sequences[arrival.key] = sequence
            self.schedule.settle(arrival, sequence)
        before = (len(sequence.blocks) - 1) * self.blocks.tokens  # tokens in all blocks but the last
        self.pool.clear_end(sequence.blocks[-1], sequence.cached - before)

    def cancel(self, key: int) -> None:
        """Drop a request."""
        with self.lock:
            if sequence := self._sequences.pop(key, None):
                self.schedule.remove(sequence)

    def load(self) -> Load:
        """Return the load as the engine counts it."""
        with self.lock:
            here = [*self.schedule.running, *self.transit.held.values()]
            active = sum(len(sequence.tokens) for sequence in here)
            waiting, blocks = len(self.schedule.waiting), self.blocks
            return Load(len(here), waiting, blocks.used, blocks.count, active, self.schedule.canaries)

    def plan(self) -> list[SequenceWork]:
        """Return the next step's work."""
        self._operate()
        with self.lock:
            works, taken = self.schedule.plan()
        self.pool.clear(taken)
        return works

    def step(self, works: list[SequenceWork]) -> Output:
        """Compute one step and return each sequence's output."""
        if raised := self.faults.raised(len(works)):
            failing = [work.sequence for work in works[:raised]]
            return self._failed(failing, "a rehearsed exception in the forward pass")
        if any(work.sequence.asks_of_prompt for work in works):
            x = self.model.hidden(works, self.pool)
            logits = self.faults.drifted(self.model.logits(x, sampling_rows(works)))
            read_prompts(works, lambda rows: self.faults.drifted(self.model.logits(x, rows)))
        else:
            logits = self.faults.drifted(self.model.forward(works, self.pool))
        due = [work.sequence for work in works if work.samples]
        choices = choose(logits, due)
        with self.lock:
            for work in works:  # after the tokens are chosen, which waits until the GPU has finished
                self.schedule.computed(work)
            pairs = zip(due, choices, strict=True)
            return [(sequence.key, self._append_token(sequence, choice)) for sequence, choice in pairs]

    def take_events(self) -> list[KvEvent]:
        """Return the prefix cache's stored and removed events since the last call."""
        with self.lock:
            return self.blocks.take_events()

    def fail_all(self, detail: str) -> Output:
        """End every request with an engine error, and free everything. No request can reuse what a broken step has left."""
        self._forget_all()
        return self._failed(list(self._sequences.values()), detail)

    def trust(self, trusted: bool) -> None:
        """Stop the reuse of all blocks computed so far and, until trusted again, of new blocks."""
        self._trusted = trusted
        self._forget_all()
        with self.lock:
            for sequence in self._sequences.values():
                sequence.shares = sequence.shares and trusted

    def limit_batch(self, share: float) -> None:
        """Run at most this share of the batch at once."""
        with self.lock:
            self.schedule.limit_batch(share)

    def _operate(self) -> None:
        """Make or undo the bit flips of a rehearsal, in order. Called between steps, on the engine's thread."""
        if self.faults.surgery:
            self._forget_all()
        while self.faults.surgery:
            seed = self.faults.surgery.popleft()
            if seed is None:
                self.surgeon.heal()
                continue
            try:
                fault = bit_flip(self.model.parameters(), seed)
                self.surgeon.inflict(fault)
                log.warning("weight_flipped", where=str(fault))
            except NotFloat32 as error:
                log.warning("weight_not_flipped", reason=str(error))

    def _forget_all(self) -> None:
        """Stop the reuse of all blocks computed so far: they may be wrong, or come from other weights."""
        with self.lock:
            self.blocks.forget_names()
            for sequence in self._sequences.values():
                sequence.shares = sequence.shares and not sequence.cached

    def _sequence(self, key: int, request: Generate, tokens: Sequential[int]) -> TorchSequence:
        stops = frozenset(request.sampling.stop_token_ids)
        return TorchSequence(
            key=key,
            tokens=list(tokens),
            prompt_tokens=request.prompt_tokens,
            sampling=request.sampling,
            seed=_seed(request),
            left=min(request.sampling.max_tokens, self.limit - len(request.tokens)),
            ends=stops if request.sampling.ignore_eos else stops | self._eos,
            barred=stops | self._eos,
            canary=request.canary,
            priority=request.priority,
            submitted=len(request.tokens),
            salt=blocks.seed(namespace=request.cache_salt),
            shares=self._prefix_caching
            and self._trusted
            and not request.canary
            and request.sampling.prompt_logprobs is None,  # its whole prompt is computed
        )

    def _append_token(self, sequence: TorchSequence, choice: SampledToken) -> Chunk:
        if choice.token is None or (sequence.before and unsound(sequence.before)):
            self._forget_all()
            self.cancel(sequence.key)
            return Chunk(0, [], error="non_finite: the logits hold NaN or infinity")
        cached = None if sequence.generated or sequence.moved else sequence.found
        temperature, vocabulary = sequence.sampling.temperature, self.model.vocabulary
        token = self.faults.misled(choice.token, temperature, vocabulary, sequence.barred)
        sequence.tokens.append(token)
        logprobs = [choice.logprob] if choice.logprob else None
        if sequence.before:
            logprobs, sequence.before = [*sequence.before, *(logprobs or ())], []
        finish = None
        if token in sequence.ends and sequence.generated > sequence.sampling.min_tokens:
            finish = "stop"
        elif sequence.generated >= sequence.left:
            finish = "length"
        if finish:
            self.cancel(sequence.key)
        return Chunk(0, [token], finish, None, logprobs, None, cached)

    def _failed(self, sequences: list[TorchSequence], detail: str) -> Output:
        for sequence in sequences:
            self.cancel(sequence.key)
        return [(sequence.key, Chunk(0, [], error=f"engine_error: {detail}")) for sequence in sequences]


def _eos(model: Model) -> frozenset[int]:
    """Return the ids that end an answer: the generation config's, otherwise the config's."""
    generation = getattr(model.module, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def _seed(request: Generate) -> int:
    """Return the request's seed, or a hash of its id, which is the same on every worker."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    return xxhash.xxh64_intdigest(request.request.encode())


def measured_profile(stepper: Stepper, settings: TransformersSettings) -> Profile:
    """Measure prefill and decode and return the profile. The stepper must be idle, and is idle again afterwards.

    It is a first estimate for the capacity model, made in about a second on an idle machine, with a few steps of each kind. The
    frontends continuously measure the durations of real requests.
    """
    deadline = time.monotonic() + MEASURE_S_MAX
    prompt = max(2, min(settings.prefill_tokens_max, stepper.limit - 2))
    prefill_s = min(_timed(lambda: _prefill(stepper, prompt)) for _ in range(2))  # the first one warms up
    curve: list[tuple[int, float]] = []
    slowest = 0.0  # without dips from noise: more sequences never take less time
    for batch in sorted({1, min(8, settings.batch_max), settings.batch_max}):
        fits = batch * stepper.blocks.needed(MEASURED_PROMPT + MEASURED_STEPS + 1) <= stepper.blocks.count
        if curve and (not fits or time.monotonic() > deadline):
            break
        slowest = max(slowest, round(_decode_ms(stepper, batch), 3))
        curve.append((batch, slowest))
    return Profile(
        kv_blocks=stepper.blocks.count,
        block_tokens=stepper.blocks.tokens,
        max_batch=settings.batch_max,
        prefill_tokens_max=settings.prefill_tokens_max,
        prefill_tokens_per_s=round(prompt / prefill_s, 1),
        tpot_ms=tuple(curve),
    )


def _prefill(stepper: Stepper, tokens: int) -> None:
    stepper.submit(-1, _request(tokens, 1))
    while stepper.busy:
        stepper.step(stepper.plan())


def _decode_ms(stepper: Stepper, batch: int) -> float:
    prompt = min(MEASURED_PROMPT, max(1, stepper.limit - MEASURED_STEPS - 2))
    for key in range(batch):
        stepper.submit(-1 - key, _request(prompt, MEASURED_STEPS + 1))
    while any(sequence.uncached > 1 for sequence in stepper.schedule.running) or stepper.schedule.waiting:
        stepper.step(stepper.plan())
    taken = []
    while stepper.busy:
        taken.append(_timed(lambda: stepper.step(stepper.plan())))
    return 1000 * sorted(taken)[len(taken) // 2] if taken else 0.0


def _request(prompt: int, tokens: int) -> Generate:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    token_ids = [3 + n % 200 for n in range(prompt)]
    return Generate(0, "measure", token_ids, prompt, sampling, canary=True)  # bypasses the prefix cache


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
