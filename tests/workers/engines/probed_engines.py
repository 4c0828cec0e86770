"""Workers with real engines in this process, and the canary loop that probes them, in real time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from canary_world import World
from memory_bus import MemoryBus
from waits import until

from controller.adapters.clock import SystemClock
from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.worker_links import Address
from controller.runtime.settings import CanarySettings
from events.observations import CanaryFailed, CanaryPassed
from workers.config.settings import WorkerConfig
from workers.engines.engine import Engine
from workers.worker import InferenceWorker

INTERVAL_S = 0.1
SAMPLED_EVERY = 2  # canaries
TOP_K = 20  # these models are nearly random: a token outside the best 20 is unlikely, one outside the best 5 is not


@dataclass
class Probed:
    """The workers' engines, and the canary loop's view of the workers."""

    world: World
    engines: tuple[Engine, ...]

    async def until(self, condition: Callable[[], object], seconds: float) -> None:
        def holds() -> bool:
            self.world.turn()
            return bool(condition())

        await until(holds, seconds, every_s=0.01)

    def sampled(self, kind: type, worker: str) -> list[CanaryPassed | CanaryFailed]:
        """Return the results of one worker's sampled canaries."""
        return [f for f in self.world.facts(kind) if f.worker == worker and f.temperature is not None]


@asynccontextmanager
async def probed(
    *engines: Engine, within_s: float = 60.0, prepare: Callable[[Engine], object] = lambda engine: None
) -> AsyncIterator[Probed]:
    """Run one worker per engine until the sampled canaries of all have passed.

    `prepare` changes each engine before the first canary.
    """
    canaries = RequestPlaneClient("canary")
    settings = CanarySettings(
        interval_s=INTERVAL_S,
        sampled_every=SAMPLED_EVERY,
        top_k=TOP_K,
        coverage=False,
        slow_floor_ms=10_000,
    )
    world = World(settings, clock=SystemClock(), prober=canaries)
    stop, bus, made = asyncio.Event(), MemoryBus(), Probed(world, engines)
    names = [f"w{number}" for number in range(len(engines))]
    workers = [
        InferenceWorker(WorkerConfig(name=name, instance="i1"), engine, world.journal, bus)
        for name, engine in zip(names, engines, strict=True)
    ]
    running: list[asyncio.Future[Any]] = [asyncio.ensure_future(worker.run(stop)) for worker in workers]
    try:
        await made.until(lambda: world.fleet.workers.keys() >= set(names), within_s)
        for engine in engines:
            prepare(engine)
        canaries.set_workers({name: Address("i1", world.fleet.workers[name].joined.url) for name in names})
        running += [asyncio.ensure_future(work) for work in (canaries.run(), world.loop.run())]
        await made.until(lambda: all(made.sampled(CanaryPassed, name) for name in names), within_s)
        yield made
    finally:
        stop.set()
        for task in running[len(workers) :]:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                await asyncio.gather(*running, return_exceptions=True)


async def a_broken_sampler_alone_is_found(fleet: Probed, within_s: float = 60.0) -> None:
    """Break the first worker's sampler. Its greedy answers stay right; a sampled canary removes it from service."""
    world = fleet.world
    assert fleet.engines[0].chaos("sampler", 0.0)
    await fleet.until(lambda: world.status("w0") == "UNHEALTHY", within_s)
    wrong = [fact for fact in world.facts(CanaryFailed) if fact.worker == "w0"]
    assert wrong and all(fact.temperature is not None and fact.confirmed for fact in wrong)
    assert "unlikely tokens" in wrong[0].detail
    assert not fleet.sampled(CanaryFailed, "w1") and world.status("w1") == "HEALTHY"
    fleet.engines[0].heal("sampler")
