"""Canaries of workers busy with other requests: the loop with real simulated workers, in real time."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest
from canary_world import World
from memory_bus import MemoryBus
from waits import until

from controller.adapters.clock import SystemClock
from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.worker_links import Address
from controller.runtime.canary.probe import Deadline, within
from controller.runtime.settings import CanarySettings
from events.observations import CanaryFailed, CanaryPassed, GoldenProposed
from events.wire import Chunk, Generate, Sampling
from workers.config.settings import WorkerConfig
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.worker import InferenceWorker

INTERVAL_S, TIMEOUT_S, PREFILL_S, TOKENS_PER_S = 0.2, 1.0, 4.0, 3_000
STUCK_S = 8.0
ENOUGH = 8  # passes: every canary has been asked, and has a golden


@dataclass
class Rig:
    """A worker, a user of it, and the canary loop."""

    world: World
    worker: InferenceWorker
    engine: SimulatedEngine
    users: RequestPlaneClient

    async def until(self, condition: Callable[[], object], seconds: float) -> float:
        began = time.monotonic()

        def holds() -> object:
            self.world.turn()
            return condition()

        await until(holds, seconds, every_s=0.01)
        return time.monotonic() - began

    def passed(self) -> int:
        return len(self.world.facts(CanaryPassed))

    def ask(self, tokens: int, number: int = 0) -> asyncio.Future[None]:
        """Send a user's prompt of `tokens` tokens; the answer is one token."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        prompt = [300 + (n + number) % 1000 for n in range(tokens)]  # shares no prefix with another prompt
        sampling = Sampling(max_tokens=1)
        self.users.open("w0", "i1", Generate(0, "user", prompt, tokens, sampling), _Ear(over))
        return over


@dataclass(eq=False)
class _Ear:
    over: asyncio.Future[None]

    def take(self, chunk: Chunk) -> None:
        if (chunk.finish or chunk.error) and not self.over.done():
            self.over.set_result(None)

    def flush(self) -> None:
        pass

    def lost(self, cause: str, detail: str) -> None:
        if not self.over.done():
            self.over.set_result(None)


@asynccontextmanager
async def rig(
    *, batch: int = 256, itl_s: float = 0.001, tokens_per_s: int = TOKENS_PER_S, coverage: bool = False
) -> AsyncIterator[Rig]:
    """Run one worker, and probe it every INTERVAL_S with a deadline of TIMEOUT_S."""
    canaries, users = RequestPlaneClient("canary"), RequestPlaneClient("f1")
    settings = CanarySettings(
        interval_s=INTERVAL_S, timeout_s=TIMEOUT_S, busy_s=30, coverage=coverage, slow_floor_ms=300
    )
    world = World(settings, clock=SystemClock(), prober=canaries)
    engine = SimulatedEngine(
        EngineShape(batch_max=batch), ConstantTiming(itl_s=itl_s, prefill_tokens_per_s=tokens_per_s)
    )
    stop, bus = asyncio.Event(), MemoryBus()
    worker = InferenceWorker(WorkerConfig(name="w0", instance="i1"), engine, world.journal, bus)
    running: list[asyncio.Future[Any]] = [asyncio.ensure_future(worker.run(stop))]
    made = Rig(world, worker, engine, users)
    try:
        await made.until(lambda: "w0" in world.fleet.workers, 10)
        address = {"w0": Address("i1", world.fleet.workers["w0"].joined.url)}
        canaries.set_workers(address)
        users.set_workers(address)
        running += [asyncio.ensure_future(work) for work in (canaries.run(), users.run(), world.loop.run())]
        await made.until(lambda: made.passed() >= ENOUGH and users.connected, 20)
        yield made
    finally:
        stop.set()
        for task in running[1:]:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.slow
async def test_a_long_prefill_raises_no_alarm_but_a_hang_during_one_does() -> None:
    async with rig() as made:
        passed, over = made.passed(), made.ask(int(PREFILL_S * TOKENS_PER_S))
        took = await made.until(over.done, 20)
        assert took > 3 * TIMEOUT_S  # three canaries would have run out of time
        await made.until(lambda: made.passed() >= passed + 3, 20)
        assert made.world.facts(CanaryFailed) == []
        assert made.world.status("w0") == "HEALTHY"

        made.ask(int(STUCK_S * TOKENS_PER_S))
        load = made.engine.load
        await made.until(lambda: load().canaries and load().running + load().waiting > load().canaries, 20)
        made.worker.server.connections.blackhole(True)
        assert await made.until(lambda: made.world.facts(CanaryFailed), 20) < STUCK_S - TIMEOUT_S
        assert made.world.facts(CanaryFailed)[0].reason == "no_response"


@pytest.mark.slow
async def test_a_full_batch_raises_no_alarm() -> None:
    async with rig(batch=2, itl_s=0.002) as made:
        passed, users = made.passed(), [made.ask(300, n) for n in range(64)]  # a tenth of a second each
        took = await made.until(lambda: all(over.done() for over in users), 60)
        assert took > 3 * TIMEOUT_S
        await made.until(lambda: made.passed() >= passed + 3, 20)
        assert made.world.facts(CanaryFailed) == []
        assert made.world.status("w0") == "HEALTHY"


async def test_questions_of_the_pool_may_queue_behind_one_another() -> None:
    async with rig(tokens_per_s=5_000, coverage=True) as made:  # it reads all of them in 1.5 s
        assert any(len(f.prompt) > 500 for f in made.world.facts(GoldenProposed))
        assert made.world.facts(CanaryFailed) == []


@dataclass
class Slowed:
    """The clock of a process on an overloaded machine: each sleep takes a multiple of its time."""

    times: float
    inner: SystemClock = field(default_factory=SystemClock)

    def now(self) -> datetime:
        return self.inner.now()

    def monotonic(self) -> float:
        return self.inner.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self.inner.sleep(seconds * self.times)


async def answered_after(seconds: float, deadline: Deadline) -> str:
    async def answer() -> str:
        await asyncio.sleep(seconds)  # how long an answer takes is what is tested
        return "right"

    return await within(deadline, answer(), lambda since, now: False)


async def test_our_own_lag_is_not_blamed_on_a_worker() -> None:
    late, steady = Slowed(times=3.0), SystemClock()
    assert await answered_after(0.8, Deadline(late, late.monotonic() + 0.4, spare_s=10.0)) == "right"
    with pytest.raises(TimeoutError):
        await answered_after(5.0, Deadline(late, late.monotonic() + 0.4, spare_s=0.5))
    with pytest.raises(TimeoutError):
        await answered_after(5.0, Deadline(steady, steady.monotonic() + 0.3, spare_s=10.0))
