"""What does one pass work on? What a scheduler says, and a performance model prices."""

from typing import NamedTuple

from workers.engines.simulated.kv.tiers import TierTraffic


class StepPlan(NamedTuple):
    """What one pass works on."""

    prefill_tokens: int = 0
    decodes: int = 0  # requests that say one more token
    prefills: tuple[int, ...] = ()  # the prompt tokens of each request
    active_blocks: int = 0  # KV blocks that requests hold
    total_blocks: int = 0
    context_tokens: int = 0  # of all that decode, together
    traffic: TierTraffic = TierTraffic()  # KV blocks that go between the tiers
    starts: tuple[
        int, ...
    ] = ()  # tokens of each of `prefills` that were computed, or found, before; empty: none
    later: int = 0  # how many of `prefills`, the first ones, have had a pass before

    @property
    def idle(self) -> bool:
        return not self.prefill_tokens and not self.decodes
