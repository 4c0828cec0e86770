"""A fault of the sampler alone is found by sampled canaries on a real engine."""

from probed_engines import a_broken_sampler_alone_is_found, probed

from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming


def engine() -> SimulatedEngine:
    return SimulatedEngine(EngineShape(), ConstantTiming(itl_s=0.001, prefill_tokens_per_s=100_000))


async def test_a_sampled_canary_finds_a_sampler_only_fault_of_the_simulated_engine() -> None:
    async with probed(engine(), engine()) as fleet:
        await a_broken_sampler_alone_is_found(fleet)
