"""How long does a step take, of an engine of this speed on this machine?

constant      the same for every token, whatever the batch: --itl-ms, and what `up` uses
model         a performance model's milliseconds, sped up
tiered        either, and the KV blocks that go between the tiers
"""

from dataclasses import dataclass
from typing import Protocol

from events.observations import Profile
from workers.engines.simulated.perf_model import PerfModel
from workers.engines.simulated.plan import StepPlan
from workers.engines.simulated.sequence import EngineShape

PREFILL_TOKENS_PER_S = 200_000.0  # where steps take time: about an 8B model on a recent GPU
FLAT_OUT_PREFILL_TOKENS_PER_S = 5_000_000.0  # for the profile only: about what a core does
FLAT_OUT_TOKEN_MS = 0.001
SLOWED_STEP_S = 0.001  # what a step that takes no time is taken for when it is slowed


class Timing(Protocol):
    """A performance model."""

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds that a step on `plan` takes; 0: as fast as the machine can."""
        ...

    def profile(self, shape: EngineShape) -> Profile:
        """Return what a worker of this speed registers."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantTiming:
    """A decode step costs the same whatever its batch; prompt tokens cost in proportion."""

    itl_s: float = 0.0
    prefill_tokens_per_s: float = 0.0  # 0: prefill takes no time

    def step_s(self, plan: StepPlan) -> float:
        prefill = plan.prefill_tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0
        return prefill + (self.itl_s if plan.decodes else 0.0)

    def profile(self, shape: EngineShape) -> Profile:
        batch, itl_ms = shape.batch_max, self.itl_s * 1e3
        first, last = (
            (itl_ms, itl_ms) if itl_ms else (FLAT_OUT_TOKEN_MS * 10, FLAT_OUT_TOKEN_MS * max(10, batch))
        )
        return Profile(
            kv_blocks=shape.kv_blocks,
            block_tokens=shape.block_tokens,
            max_batch=batch,
            prefill_tokens_per_s=self.prefill_tokens_per_s or FLAT_OUT_PREFILL_TOKENS_PER_S,
            tpot_ms=((1, first), (batch, last)) if batch > 1 else ((1, first),),
            prefill_tokens_max=shape.prefill_tokens_max,
        )


@dataclass(frozen=True, slots=True)
class ModelTiming:
    """What a performance model says, `speedup` times faster, and decoding `decode_speedup` times once more."""

    model: PerfModel
    speedup: float = 1.0
    decode_speedup: float = 1.0

    def step_s(self, plan: StepPlan) -> float:
        prefill = self.model.prefill_ms(plan) if plan.prefill_tokens else 0.0
        decode = self.model.decode_ms(plan) / self.decode_speedup
        return (prefill + decode) / self.speedup / 1e3

    def profile(self, shape: EngineShape) -> Profile:
        """Each request holds as many blocks as there are for each in a full batch; prompts are as long as one pass takes."""
        prompt = min(shape.prefill_tokens_max, shape.context_tokens)
        prefill_s = self.step_s(StepPlan(prompt, 0, (prompt,)))
        batches = sorted({max(1, shape.batch_max * quarter // 4) for quarter in range(5)})
        return Profile(
            kv_blocks=shape.kv_blocks,
            block_tokens=shape.block_tokens,
            max_batch=shape.batch_max,
            prefill_tokens_per_s=prompt / max(prefill_s, 1e-9),
            tpot_ms=tuple((batch, self._tpot_ms(batch, shape)) for batch in batches),
            prefill_tokens_max=shape.prefill_tokens_max,
        )

    def _tpot_ms(self, batch: int, shape: EngineShape) -> float:
        blocks = shape.kv_blocks * batch // shape.batch_max
        tokens = min(blocks * shape.block_tokens, batch * shape.context_tokens)
        return self.step_s(StepPlan(0, batch, (), blocks, shape.kv_blocks, tokens)) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredTiming:
    """Blocks are fetched before the pass that needs them. Those that leave do so beside it, and hold it up only where they
    take longer. What comes from the disk goes through the host's memory."""

    timing: Timing
    block_bytes: int
    host_bytes_per_s: float
    disk_bytes_per_s: float

    def step_s(self, plan: StepPlan) -> float:
        lasts, moved = self.timing.step_s(plan), plan.traffic
        if not any(moved):
            return lasts
        host, disk = self.block_bytes / self.host_bytes_per_s, self.block_bytes / self.disk_bytes_per_s
        fetched = moved.from_host * host + moved.from_disk * (disk + host)
        return fetched + max(lasts, moved.to_host * host + moved.to_disk * disk)

    def profile(self, shape: EngineShape) -> Profile:
        return self.timing.profile(shape)
