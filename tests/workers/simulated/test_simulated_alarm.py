"""Short steps end when they are due, not a millisecond before or after."""

import asyncio
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop

from events.wire import Generate, Sampling
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.rank import Alarm
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs timerfd: run it on Linux")
LATE_S = 1.0


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def watched(alarm: Alarm) -> asyncio.Event:
    """Return a flag that is set when the alarm expires."""
    rung = asyncio.Event()

    def ring() -> None:
        if alarm.expired():
            rung.set()

    asyncio.get_running_loop().add_reader(alarm.file, ring)
    return rung


async def rings(alarm: Alarm, rung: asyncio.Event, after_s: float) -> float:
    """Return how late it rings; below 0: early."""
    due = time.monotonic() + after_s
    rung.clear()
    alarm.set(due)
    async with asyncio.timeout(20):
        await rung.wait()
    return time.monotonic() - due


def close(alarm: Alarm) -> None:
    asyncio.get_running_loop().remove_reader(alarm.file)
    alarm.close()


def test_it_never_rings_early_nor_long_after_its_time() -> None:
    async def main() -> None:
        alarm = Alarm()
        rung = watched(alarm)
        assert all([0 <= await rings(alarm, rung, step * 0.00037) < LATE_S for step in range(12)])
        assert await rings(alarm, rung, -5.0) < 5.0 + LATE_S  # a past time rings at once
        close(alarm)

    run(main())


def test_a_replaced_or_cancelled_time_does_not_ring() -> None:
    async def main() -> None:
        alarm, later, began = Alarm(), Alarm(), time.monotonic()
        rung = watched(alarm)
        alarm.set(began + 0.001)
        alarm.set(began + 0.02)
        async with asyncio.timeout(20):
            await rung.wait()
        assert time.monotonic() - began >= 0.02, "at the second time"
        rung.clear()
        alarm.set(time.monotonic() + 0.001)
        alarm.cancel()
        await rings(later, watched(later), 0.02)
        assert not rung.is_set()
        close(later)
        close(alarm)

    run(main())


def test_an_engine_with_short_steps_gives_every_token_and_none_too_early() -> None:
    async def main() -> None:
        engine, said, step_s = SimulatedEngine(EngineShape(), ConstantTiming(0.0024)), list[float](), 0.0024
        over = asyncio.Event()

        def deliver(out: Any) -> None:
            said.append(time.monotonic())
            if out[0][1].finish:
                over.set()

        await engine.start(deliver)
        engine.submit(1, Generate(1, "a", [300, 301], 2, Sampling(max_tokens=20, ignore_eos=True)))
        async with asyncio.timeout(20):
            await over.wait()
        await engine.stop()
        assert len(said) == 20
        assert said[-1] - said[0] > 16.5 * step_s  # up to 5 ms are caught up with

    run(main())
