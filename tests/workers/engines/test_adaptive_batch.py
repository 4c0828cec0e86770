"""An engine's own limit: less while its steps are late, a little more at a time again, and never for how long requests last."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.virtual_loop import VirtualLoop
from events.observations import Profile
from events.wire import Chunk, Generate, Sampling
from workers.config.settings_check import load_settings
from workers.engines.adaptive import CUT, LEAST, LOOK_S, STEPS_LEAST, TOLERATED, AdaptiveEngine, BatchLimit
from workers.engines.build import build_engine
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming, StepPlan

BATCH = 64
STEP_S = 0.020  # of a full batch, by its profile


def profile(**changes: Any) -> Profile:
    given: dict[str, Any] = {
        "kv_blocks": 100,
        "block_tokens": 16,
        "max_batch": BATCH,
        "prefill_tokens_per_s": 1e4,
        "tpot_ms": ((1, 5.0), (BATCH, STEP_S * 1000)),
    }
    return Profile(**(given | changes))


def measured(limit: BatchLimit, step_s: float, running: int, looks: int = 1) -> int:
    for _ in range(looks):
        for _ in range(STEPS_LEAST):
            limit.step(step_s)
        limit.look(running)
    return limit.limit


def test_steps_that_are_late_cut_what_runs_by_a_tenth_and_never_below_a_quarter() -> None:
    limit = BatchLimit(profile())
    late = STEP_S * TOLERATED * 1.1
    assert measured(limit, late, 40) == int(40 * CUT), "of what runs: the limit was not what held it"
    assert measured(limit, late, 36) == int(36 * CUT)
    assert measured(limit, late, 1, looks=99) == int(BATCH * LEAST)


def test_steps_in_time_give_it_back_a_little_at_a_time_where_it_is_used() -> None:
    limit = BatchLimit(profile())
    measured(limit, 1.0, 20)
    assert measured(limit, STEP_S, 5) == 18, "nobody needs more"
    assert [measured(limit, STEP_S, limit.limit) for _ in range(3)] == [20, 22, 24]
    assert measured(limit, STEP_S, BATCH, looks=99) == BATCH


def test_a_few_steps_say_nothing() -> None:
    limit = BatchLimit(profile())
    for _ in range(STEPS_LEAST - 1):
        limit.step(9.0)
    assert not limit.look(BATCH) and limit.limit == BATCH


def test_one_step_that_takes_for_ever_is_no_reason() -> None:
    limit = BatchLimit(profile())
    for _ in range(19):
        limit.step(STEP_S)
    limit.step(60.0)
    assert not limit.look(BATCH)


@pytest.mark.parametrize("unsaid", [{"tpot_ms": ()}, {"tpot_ms": ((1, 0.0),)}])
def test_an_engine_that_does_not_say_how_fast_it_is_has_no_limit(unsaid: dict[str, Any]) -> None:
    assert measured(BatchLimit(profile(**unsaid)), 9.0, BATCH, looks=9) == BATCH


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 100)), max_size=50))
def test_the_limit_stays_within_its_bounds(looks: list[tuple[float, int]]) -> None:
    limit = BatchLimit(profile())
    for step_s, running in looks:
        measured(limit, step_s, running)
        assert int(BATCH * LEAST) <= limit.limit <= BATCH


class Slow(ConstantTiming):
    """Steps that take longer, the more requests share them."""

    def step_s(self, plan: StepPlan) -> float:
        return 0.001 * plan.decodes

    def profile(self, shape: EngineShape) -> Profile:
        return profile(max_batch=shape.batch_max, tpot_ms=((1, 1.0), (shape.batch_max, shape.batch_max / 4)))


def test_a_simulated_engine_finds_the_batch_at_which_its_steps_are_in_time() -> None:
    """Its steps take a millisecond for each request, which is four times what it says: 24 at once are as late as is borne."""

    async def run() -> None:
        out: list[tuple[int, Chunk]] = []
        engine = AdaptiveEngine(SimulatedEngine(EngineShape(batch_max=BATCH), Slow()))
        await engine.start(out.extend)
        for key in range(3 * BATCH):
            engine.submit(key, Generate(key, f"r{key}", [300 + key], 1, Sampling(600, ignore_eos=True)))
        seen = []
        for _ in range(400):
            await asyncio.sleep(LOOK_S)
            load = engine.load()
            seen.append((load.batch, load.running))
        late = seen[200:300]  # those that ran when it was too many have ended
        assert all(16 <= batch <= 30 for batch, _ in late), late[:5]
        assert all(running <= 30 for _, running in late)
        engine.limit_batch(0.125)
        await asyncio.sleep(60)
        assert engine.load().running <= 8 or not engine.load().waiting, "what it is told holds as well"
        await engine.stop()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def test_it_is_off_unless_it_is_asked_for() -> None:
    usual = load_settings({"engine": "simulated"}, {})
    assert not isinstance(build_engine(usual), AdaptiveEngine)
    asked = load_settings({"engine": "simulated"}, {"HOLDFAST_WORKER_ADAPTIVE_BATCH": "true"})
    assert isinstance(build_engine(asked), AdaptiveEngine)
