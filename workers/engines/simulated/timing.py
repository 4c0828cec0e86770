"""How long does a step take? The seam where the full mocker's performance model goes."""

from dataclasses import dataclass
from typing import Protocol

from events.observations import Profile
from workers.engines.simulated.scheduler import Plan
from workers.engines.simulated.sequence import Shape

PREFILL_TOKENS_PER_S = 200_000.0  # where steps take time: about an 8B model on a recent GPU
FLAT_OUT_PREFILL_TOKENS_PER_S = 5_000_000.0  # for the profile only: about what a core does
FLAT_OUT_TOKEN_MS = 0.001
SLOWED_STEP_S = 0.001  # what a step that takes no time is taken for when it is slowed


class Timing(Protocol):
    """A performance model."""

    def step_s(self, plan: Plan) -> float:
        """Return the seconds that a step on `plan` takes; 0: as fast as the machine can."""
        ...

    def profile(self, shape: Shape) -> Profile:
        """Return what a worker of this speed registers."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantTiming:
    """A decode step costs the same whatever its batch; prompt tokens cost in proportion."""

    itl_s: float = 0.0
    prefill_tokens_per_s: float = 0.0  # 0: prefill takes no time

    def step_s(self, plan: Plan) -> float:
        prefill = plan.prefill_tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0
        return prefill + (self.itl_s if plan.decodes else 0.0)

    def profile(self, shape: Shape) -> Profile:
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
        )
