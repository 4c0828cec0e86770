"""The adaptive batch limit of an engine: it drops while steps are late, and grows back slowly.

The duration of whole requests has no effect.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waits import virtual

from benchmarks.virtual_loop import VirtualLoop
from events.observations import Profile
from events.wire import Chunk, Generate, Sampling
from workers.config.settings_check import load_settings
from workers.engines.admission import ADJUST_S, CUT, LEAST, STEPS_LEAST, TOLERATED, AdaptiveEngine, BatchLimit
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


def measured(limit: BatchLimit, step_s: float, running: int, adjustments: int = 1) -> int:
    for _ in range(adjustments):
        for _ in range(STEPS_LEAST):
            limit.step(step_s)
        limit.adjust(running)
    return limit.limit


def test_late_steps_cut_the_limit_by_a_tenth_down_to_a_quarter() -> None:
    limit = BatchLimit(profile())
    late = STEP_S * TOLERATED * 1.1
    assert measured(limit, late, 40) == int(40 * CUT), "relative to what runs, which was below the limit"
    assert measured(limit, late, 36) == int(36 * CUT)
    assert measured(limit, late, 1, adjustments=99) == int(BATCH * LEAST)


def test_steps_in_time_raise_a_limit_that_is_reached() -> None:
    limit = BatchLimit(profile())
    measured(limit, 1.0, 20)
    assert measured(limit, STEP_S, 5) == 18, "no more is needed"
    assert [measured(limit, STEP_S, limit.limit) for _ in range(3)] == [20, 22, 24]
    assert measured(limit, STEP_S, BATCH, adjustments=99) == BATCH


def test_a_few_steps_change_nothing() -> None:
    limit = BatchLimit(profile())
    for _ in range(STEPS_LEAST - 1):
        limit.step(9.0)
    assert not limit.adjust(BATCH) and limit.limit == BATCH


def test_one_very_long_step_changes_nothing() -> None:
    limit = BatchLimit(profile())
    for _ in range(19):
        limit.step(STEP_S)
    limit.step(60.0)
    assert not limit.adjust(BATCH)


@pytest.mark.parametrize("missing", [{"tpot_ms": ()}, {"tpot_ms": ((1, 0.0),)}])
def test_an_engine_without_a_speed_profile_has_no_limit(missing: dict[str, Any]) -> None:
    assert measured(BatchLimit(profile(**missing)), 9.0, BATCH, adjustments=9) == BATCH


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 100)), max_size=50))
def test_the_limit_stays_within_its_bounds(adjustments: list[tuple[float, int]]) -> None:
    limit = BatchLimit(profile())
    for step_s, running in adjustments:
        measured(limit, step_s, running)
        assert int(BATCH * LEAST) <= limit.limit <= BATCH


class Slow(ConstantTiming):
    """Steps that take longer the more requests share them."""

    def step_s(self, plan: StepPlan) -> float:
        return 0.001 * plan.decodes

    def profile(self, shape: EngineShape) -> Profile:
        return profile(max_batch=shape.batch_max, tpot_ms=((1, 1.0), (shape.batch_max, shape.batch_max / 4)))


def test_a_simulated_engine_converges_to_a_batch_with_steps_in_time() -> None:
    """Its steps take 1 ms per request, four times its profile: 24 at once are as late as tolerated."""

    async def run() -> None:
        out: list[tuple[int, Chunk]] = []
        engine = AdaptiveEngine(SimulatedEngine(EngineShape(batch_max=BATCH), Slow()))
        await engine.start(out.extend)
        for key in range(3 * BATCH):
            engine.submit(key, Generate(key, f"r{key}", [300 + key], 1, Sampling(600, ignore_eos=True)))
        seen = []
        for _ in range(400):
            await virtual(ADJUST_S)
            load = engine.load()
            seen.append((load.batch, load.running))
        late = seen[200:300]  # those that ran above the limit have ended
        assert all(16 <= batch <= 30 for batch, _ in late), late[:5]
        assert all(running <= 30 for _, running in late)
        engine.limit_batch(0.125)
        await virtual(60)
        assert engine.load().running <= 8 or not engine.load().waiting, "a requested limit holds as well"
        await engine.stop()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def test_it_is_off_by_default() -> None:
    usual = load_settings({"engine": "simulated"}, {})
    assert not isinstance(build_engine(usual), AdaptiveEngine)
    asked = load_settings({"engine": "simulated"}, {"HOLDFAST_WORKER_ADAPTIVE_BATCH": "true"})
    assert isinstance(build_engine(asked), AdaptiveEngine)
