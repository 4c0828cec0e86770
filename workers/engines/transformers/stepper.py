"""Runs single steps of the transformers engine, and measures how long they take.

A step plans which tokens to compute, computes their logits, and chooses the next tokens.
"""

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Sequential
from functools import cached_property

import structlog

from events import blocks
from events.kv import KvEvent
from events.observations import Profile
from events.token_bytes import read_token_bytes
from events.wire import Chunk, Generate, Load, Sampling
from workers.engines.constrained import ConstraintMatchers
from workers.engines.engine import lacks_adapter, seed_of, validate_request
from workers.engines.transformers.blocks import Blocks
from workers.engines.transformers.faults import NotFloat32, TorchFaults, WeightFaultInjector, bit_flip
from workers.engines.transformers.model import Model, sampling_rows
from workers.engines.transformers.sampling import SampledToken, choose, read_prompts, unsound
from workers.engines.transformers.schedule import Schedule, TorchArrival, TorchDeparture, TorchTransit
from workers.engines.transformers.sequence import SequenceWork, TorchSequence
from workers.engines.transformers.settings import TransformersSettings

MEASURE_S_MAX = 1.5  # after this time, no larger batch is measured for the profile
MEASURED_STEPS = 4  # decode steps per measured batch
MEASURED_PROMPT = 16  # prompt tokens of the requests in a measured batch

log = structlog.get_logger(__name__)

Output = list[tuple[int, Chunk]]


class Stepper:
    """Runs steps of a model, and keeps the model's KV cache and requests.

    `lock` protects the schedule and the block tables, because moves of requests allocate and free blocks on the worker's event
    loop. The lock is never held while the model computes.
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
        self._tokenizer = settings.folder / "tokenizer.json"
        self._sequences: dict[int, TorchSequence] = {}

    @cached_property
    def _matchers(self) -> ConstraintMatchers:
        """The token matchers of constrained answers.

        They are created for the first constrained request, because reading the vocabulary takes seconds.
        """
        return ConstraintMatchers(read_token_bytes(self._tokenizer), self._eos)

    def __contains__(self, key: int) -> bool:
        """Return whether the request with this key was accepted and has not ended."""
        return key in self._sequences

    @property
    def busy(self) -> bool:
        """Whether the engine has at least one request."""
        return bool(self._sequences)

    @property
    def transit(self) -> TorchTransit:
        """The moves of requests to and from other workers."""
        return self.schedule.transit

    def refusal(self, request: Generate) -> str | None:
        """Return why this request can never be served, or None if it can. May be called from any thread."""
        vocabulary = self.model.vocabulary
        if lacking := lacks_adapter(request, ()):
            return lacking
        if refused := validate_request(request, self.limit, vocabulary):
            return refused
        if request.guided is not None and (refused := self._matchers.refusal(request.guided)):
            return refused
        if any(not 0 <= stop < vocabulary for stop in request.sampling.stop_token_ids):
            return f"invalid_request: stop token ids go from 0 to {vocabulary - 1}"
        return None

    def submit(self, key: int, request: Generate) -> Chunk | None:
        """Queue a request and return None. If the request allows no new token, return its final chunk instead."""
        sequence = self._sequence(key, request, request.tokens)
        if sequence.left <= 0:
            return Chunk(request.stream, [], finish="length")
        with self.lock:
            self._sequences[key] = sequence
            # a canary that detects a faulty worker must not wait for others
            self.schedule.add(sequence, first=request.canary)
        return None

    def depart(self, key: int) -> TorchDeparture | None:
        """Begin the move of a request to another worker. Return None if the key is unknown or the request cannot move."""
        with self.lock:
            sequence = self._sequences.get(key)
            return None if sequence is None else self.schedule.depart(sequence)

    def reserve(self, key: int, request: Generate, room_tokens: int) -> TorchArrival | str:
        """Reserve the KV blocks for a request that arrives with its KV cache, or return the reason for a refusal.

        `room_tokens` is the largest number of tokens that the request can have when it arrives.
        """
        if request.canary:
            return "a canary does not move"
        with self.lock:
            room = min(max(room_tokens, len(request.tokens)), self.limit)
            return self.schedule.reserve(key, request, room)

    def settle(self, arrival: TorchArrival, tokens: Sequential[int], computed: int) -> None:
        """Add a request that has arrived with its KV cache to the running batch.

        `tokens` are the prompt and all generated tokens. The KV of the first `computed` of them has arrived.
        """
        sequence = self._sequence(arrival.key, arrival.request, tokens)
        # blocks computed by another worker are used for this request alone
        sequence.moved, sequence.shares = True, False
        # the last token is computed here, because it gives the logits
        sequence.cached = min(computed, len(tokens) - 1)
        with self.lock:
            self._sequences[arrival.key] = sequence
            self.schedule.settle(arrival, sequence)
        before = (len(sequence.blocks) - 1) * self.blocks.tokens  # tokens in all blocks but the last
        self.pool.clear_end(sequence.blocks[-1], sequence.cached - before)

    def cancel(self, key: int) -> None:
        """Drop a request and free its blocks. Unknown keys are ignored."""
        with self.lock:
            if sequence := self._sequences.pop(key, None):
                self.schedule.remove(sequence)

    def load(self) -> Load:
        """Return the numbers of running and waiting requests, used blocks and tokens."""
        with self.lock:
            here = [*self.schedule.running, *self.transit.held.values()]
            active = sum(len(sequence.tokens) for sequence in here)
            waiting, blocks = len(self.schedule.waiting), self.blocks
            return Load(len(here), waiting, blocks.used, blocks.count, active, self.schedule.canaries)

    def plan(self) -> list[SequenceWork]:
        """Plan the next step, clear the blocks that are newly allocated for it, and return the work of the step.

        The list is empty if there is no work.
        """
        self._operate()
        with self.lock:
            works, taken = self.schedule.plan()
        self.pool.clear(taken)
        return works

    def step(self, works: list[SequenceWork]) -> Output:
        """Compute the planned step, and return the output of each sequence that got a token or failed."""
        if raised := self.faults.raised(len(works)):
            failing = [work.sequence for work in works[:raised]]
            return self._failed(failing, "a rehearsed exception in the forward pass")
        if any(work.sequence.needs_prompt_logprobs for work in works):
            x = self.model.hidden(works, self.pool)
            logits = self.faults.drifted(self.model.logits(x, sampling_rows(works)))
            read_prompts(works, lambda rows: self.faults.drifted(self.model.logits(x, rows)))
        else:
            logits = self.faults.drifted(self.model.forward(works, self.pool))
        due = [work.sequence for work in works if work.samples]
        choices = choose(logits, due)
        with self.lock:
            for work in works:  # the blocks are complete now, because `choose` has waited for the GPU
                self.schedule.computed(work)
            pairs = zip(due, choices, strict=True)
            return [(sequence.key, self._append_token(sequence, choice)) for sequence, choice in pairs]

    def take_events(self) -> list[KvEvent]:
        """Return the KV events of the prefix cache since the last call."""
        with self.lock:
            return self.blocks.take_events()

    def fail_all(self, detail: str) -> Output:
        """End every request with an engine error and free its blocks. Return the error chunks.

        No later request can reuse the blocks computed so far, because the failed step may have left wrong values in them.
        """
        self._forget_all()
        return self._failed(list(self._sequences.values()), detail)

    def trust(self, trusted: bool) -> None:
        """Stop the reuse of all blocks computed so far.

        If not `trusted`, later blocks are not reused either, until a call with `trusted` true.
        """
        self._trusted = trusted
        self._forget_all()
        with self.lock:
            for sequence in self._sequences.values():
                sequence.shares = sequence.shares and trusted

    def limit_batch(self, share: float) -> None:
        """Limit the running batch to this share of its full size."""
        with self.lock:
            self.schedule.limit_batch(share)

    def _operate(self) -> None:
        """Inject or undo the bit flips that are queued in `faults`, in order. Called between steps, on the engine's thread."""
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
        """Stop the reuse of all blocks computed so far, because they may be wrong, or computed with other weights."""
        with self.lock:
            self.blocks.forget_names()
            for sequence in self._sequences.values():
                sequence.shares = sequence.shares and not sequence.cached

    def _sequence(self, key: int, request: Generate, tokens: Sequential[int]) -> TorchSequence:
        stops = frozenset(request.sampling.stop_token_ids)
        follower = None if request.guided is None else self._matchers.follow(request.guided)
        if follower is not None:
            for token in tokens[len(request.tokens) :]:
                follower.advance(token)
        return TorchSequence(
            key=key,
            tokens=list(tokens),
            prompt_tokens=request.prompt_tokens,
            sampling=request.sampling,
            seed=seed_of(request),
            left=min(request.sampling.max_tokens, self.limit - len(request.tokens)),
            ends=stops if request.sampling.ignore_eos else stops | self._eos,
            barred=stops | self._eos,
            canary=request.canary,
            priority=request.priority,
            submitted=len(request.tokens),
            salt=blocks.seed(namespace=request.cache_salt),
            shares=self._shares(request),
            follower=follower,
        )

    def _shares(self, request: Generate) -> bool:
        """Return whether a request may share blocks with other requests.

        Canaries share no blocks. Requests with prompt logprobs share none, because their whole prompts must be computed.
        """
        own = request.canary or request.sampling.prompt_logprobs is not None
        return self._prefix_caching and self._trusted and not own

    def _append_token(self, sequence: TorchSequence, choice: SampledToken) -> Chunk:
        if choice.token is None or (sequence.before and unsound(sequence.before)):
            self._forget_all()
            self.cancel(sequence.key)
            return Chunk(0, [], error="non_finite: the logits hold NaN or infinity")
        cached = None if sequence.generated or sequence.moved else sequence.found
        temperature, vocabulary = sequence.sampling.temperature, self.model.vocabulary
        token = self.faults.misled(choice.token, temperature, vocabulary, sequence.barred)
        sequence.tokens.append(token)
        if sequence.follower is not None:
            sequence.follower.advance(token)
        logprobs = [choice.logprob] if choice.logprob else None
        if sequence.before:
            logprobs, sequence.before = [*sequence.before, *(logprobs or ())], []
        finish = None
        follower = sequence.follower
        complete = follower is not None and not follower.broken and token in self._eos
        if complete or (token in sequence.ends and sequence.generated > sequence.sampling.min_tokens):
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
    """Return the token ids that end an answer, from the model's generation config, or else from its config."""
    generation = getattr(model.module, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def measured_profile(stepper: Stepper, settings: TransformersSettings) -> Profile:
    """Measure the speed of prefill and decode steps and return the profile. The stepper must be idle.

    The profile is a first estimate for the capacity model, from a few steps of each kind. The measurement takes about a second on
    an idle machine. Later, the frontends continuously measure the durations of real requests.
    """
    deadline = time.monotonic() + MEASURE_S_MAX
    prompt = max(2, min(settings.prefill_tokens_max, stepper.limit - 2))
    # the first call is slower (warm-up)
    prefill_s = min(_timed(lambda: _prefill(stepper, prompt)) for _ in range(2))
    curve: list[tuple[int, float]] = []
    slowest = 0.0  # a larger batch gets at least this time, so that noise causes no dips in the curve
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
