"""What does one step of the transformers engine do? Plan, compute, choose, hand over. No thread, no clock.

The engine's thread is the only caller once it runs; before that the engine measures itself with a stepper's parts.
"""

import structlog
import xxhash

from events.wire import Chunk, Generate, Load
from workers.engines.transformers.faults import Faults, flip_bit
from workers.engines.transformers.model import Model
from workers.engines.transformers.sampling import Choice, Due, choose
from workers.engines.transformers.schedule import Blocks, Schedule, Sequence, Work
from workers.engines.transformers.settings import TransformersSettings
from workers.engines.transformers.weight_faults import NotFloat32, Surgeon

log = structlog.get_logger(__name__)

Output = list[tuple[int, Chunk]]


class Stepper:
    """A model, its KV cache, and the requests in it."""

    def __init__(self, model: Model, settings: TransformersSettings) -> None:
        self.model = model
        self.faults = Faults()
        self.blocks = Blocks(settings.kv_tokens // settings.block_tokens, settings.block_tokens)
        self.pool = model.pool(blocks=self.blocks.count, block_tokens=settings.block_tokens)
        self.schedule = Schedule(
            self.blocks, batch_max=settings.batch_max, prefill_tokens_max=settings.prefill_tokens_max
        )
        self.surgeon = Surgeon(model.parameters())
        self.limit = min(model.context_tokens, self.blocks.count * settings.block_tokens)
        self._eos = _eos(model)
        self._sequences: dict[int, Sequence] = {}

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._sequences)

    def refusal(self, request: Generate) -> str | None:
        """Return why this request cannot be served, or None. Reads nothing that changes: callable from any thread."""
        tokens, sampling = request.tokens, request.sampling
        if not tokens:
            return "invalid_request: the prompt is empty"
        if len(tokens) >= self.limit:
            return f"invalid_request: {len(tokens)} tokens leave no room in a context of {self.limit}"
        if min(tokens) < 0 or max(tokens) >= self.model.vocabulary:
            return f"invalid_request: token ids go from 0 to {self.model.vocabulary - 1}"
        if request.guided is not None:
            return "invalid_request: this engine has no guided decoding"
        if any(not 0 <= stop < self.model.vocabulary for stop in sampling.stop_token_ids):
            return f"invalid_request: stop token ids go from 0 to {self.model.vocabulary - 1}"
        return None

    def submit(self, key: int, request: Generate) -> Chunk | None:
        """Take a request in; return the chunk that ends it if it asks for nothing."""
        left = min(request.sampling.max_tokens, self.limit - len(request.tokens))
        if left <= 0:
            return Chunk(request.stream, [], finish="length")
        stops = frozenset(request.sampling.stop_token_ids)
        sequence = Sequence(
            key=key,
            tokens=list(request.tokens),
            prompt_tokens=request.prompt_tokens,
            sampling=request.sampling,
            seed=_seed(request),
            left=left,
            ends=stops if request.sampling.ignore_eos else stops | self._eos,
            barred=stops | self._eos,
        )
        self._sequences[key] = sequence
        self.schedule.add(sequence, first=request.canary)  # what finds a sick worker must not wait for others
        return None

    def cancel(self, key: int) -> None:
        """Forget a request."""
        if sequence := self._sequences.pop(key, None):
            self.schedule.remove(sequence)

    def load(self) -> Load:
        """Return the load as the engine counts it."""
        active = sum(len(sequence.tokens) for sequence in self.schedule.running)
        running, waiting = len(self.schedule.running), len(self.schedule.waiting)
        return Load(running, waiting, self.blocks.used, self.blocks.count, active)

    def plan(self) -> list[Work]:
        """Return the next step's work."""
        self._operate()
        works, taken = self.schedule.plan()
        self.pool.clear(taken)
        return works

    def step(self, works: list[Work]) -> Output:
        """Compute one step and return what each sequence gets of it."""
        if raised := self.faults.raised(len(works)):
            return self._failed(
                [work.sequence for work in works[:raised]], "a rehearsed exception in the forward pass"
            )
        logits = self.faults.drifted(self.model.forward(works, self.pool))
        for work in works:
            work.sequence.cached = work.start + work.count
        due = [work.sequence for work in works if work.samples]
        choices = choose(logits, [_due(sequence) for sequence in due])
        return [
            (sequence.key, self._said(sequence, choice))
            for sequence, choice in zip(due, choices, strict=True)
        ]

    def fail_all(self, detail: str) -> Output:
        """End every request with an engine error, and free everything."""
        return self._failed(list(self._sequences.values()), detail)

    def _operate(self) -> None:
        """Make the bit flips that a rehearsal asked for, or undo them, in the order in which they were asked for: only
        between steps, on the engine's thread."""
        while self.faults.surgery:
            seed = self.faults.surgery.popleft()
            if seed is None:
                self.surgeon.heal()
                continue
            try:
                log.warning("weight_flipped", where=flip_bit(self.model.parameters(), self.surgeon, seed))
            except NotFloat32 as error:
                log.warning("weight_not_flipped", reason=str(error))

    def _said(self, sequence: Sequence, choice: Choice) -> Chunk:
        if choice.token is None:
            self.cancel(sequence.key)
            return Chunk(0, [], error="non_finite: the logits hold NaN or infinity")
        cached = 0 if not sequence.generated else None  # there is no prefix cache
        token = self.faults.altered(choice.token, self.model.vocabulary, sequence.barred)
        sequence.tokens.append(token)
        finish = None
        if token in sequence.ends and sequence.generated > sequence.sampling.min_tokens:
            finish = "stop"
        elif sequence.generated >= sequence.left:
            finish = "length"
        if finish:
            self.cancel(sequence.key)
        return Chunk(0, [token], finish, None, [choice.logprob] if choice.logprob else None, None, cached)

    def _failed(self, sequences: list[Sequence], detail: str) -> Output:
        for sequence in sequences:
            self.cancel(sequence.key)
        return [(sequence.key, Chunk(0, [], error=f"engine_error: {detail}")) for sequence in sequences]


def _due(sequence: Sequence) -> Due:
    return Due(
        tokens=sequence.tokens,
        prompt_tokens=sequence.prompt_tokens,
        generated=sequence.generated,
        sampling=sequence.sampling,
        seed=sequence.seed,
        barred=sequence.barred,
    )


def _eos(model: Model) -> frozenset[int]:
    """Return the ids that end an answer: the generation config's, else the config's."""
    generation = getattr(model.module, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def _seed(request: Generate) -> int:
    """Return the request's seed; without one its id serves, which stays the same wherever the request goes."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    return xxhash.xxh64_intdigest(request.request.encode())
