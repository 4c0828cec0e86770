"""Runs some hundred streams under random faults; `python -m benchmarks chaos` runs ten thousand."""

import msgspec
import pytest

from benchmarks.failures import chaos
from events.wire import Generate
from workers.engines.engine import Engine
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.timing import ConstantTiming

TIMING = ConstantTiming(itl_s=chaos.STEP_S, prefill_tokens_per_s=200_000)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "plane"), [(1, "tcp"), (3, "nats")])
async def test_no_token_is_lost_doubled_or_altered_and_no_block_leaks(
    seed: int, plane: str, request: pytest.FixtureRequest
) -> None:
    broker = request.getfixturevalue("nats_server").url if plane == "nats" else ""
    found = await chaos.run(seed, 300, broker=broker)
    assert (found["streams"], found["wrong"], found["leaks"]) == (300, 0, []), found
    assert (found["lost"], found["doubled"], found["altered"]) == (0, 0, 0)
    assert found["streams moved"] > 20 and sum(found["faults"].values()) >= 8


def test_a_seed_determines_the_faults_and_the_streams() -> None:
    first, again, other = (list(chaos.faults(seed, 2000)) for seed in (1, 1, 2))
    assert first == again != other
    assert {fault.verb for fault in first} == {"kill", "hang", "drain", "error", "move"}
    assert chaos.asked(1, 7) == chaos.asked(1, 7) != chaos.asked(2, 7)


class LostToken(SimulatedEngine):
    """Drops the last token of what is replayed to it."""

    def submit(self, key: int, request: Generate) -> None:
        if len(request.tokens) > request.prompt_tokens:
            request = msgspec.structs.replace(request, tokens=request.tokens[:-1])
        super().submit(key, request)


class BlockLeak(SimulatedEngine):
    """Leaks a block of each cancelled request."""

    def cancel(self, key: int) -> None:
        super().cancel(key)
        kv = self.each[0].scheduler.kv
        kv.use(kv.partials(1))


@pytest.mark.slow
@pytest.mark.parametrize(("made", "what"), [(LostToken, "wrong"), (BlockLeak, "leaks")])
async def test_errors_are_found(made: type[SimulatedEngine], what: str) -> None:
    def engine() -> Engine:
        return made(chaos.SHAPE, TIMING)

    found = await chaos.run(3, 150, made=engine, quiet_s=0.5)
    assert found[what], found
