"""A worker that runs in the test's process, and the facts and heartbeats that it sends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from memory_bus import MemoryBus
from memory_journal import MemoryJournal, MemoryStream

from events import subjects
from events.fact import Fact
from workers.config.settings import WorkerConfig
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.worker import InferenceWorker, WorkerDeadlines

Eventually = Callable[..., Awaitable[None]]
DIED = "the simulated engine died, as the rehearsal asked"
ABOUT: dict[str, Any] = {"worker": "w0", "instance": "i1"}


@dataclass
class Life:
    """One worker running in this process, and what it has sent to the fleet."""

    worker: InferenceWorker
    stream: MemoryStream
    bus: MemoryBus
    stop: asyncio.Event
    hurried: asyncio.Event
    running: asyncio.Task[int]

    @property
    def facts(self) -> list[Fact]:
        return [event.fact for event in self.stream.events]

    @property
    def port(self) -> int:
        return self.worker.server.address[1]

    @property
    def beats(self) -> list[Any]:
        return [body for subject, body in self.bus.said if subject == subjects.beat("w0")]

    async def end(self) -> int:
        self.stop.set()
        async with asyncio.timeout(20):
            return await self.running


Begin = Callable[..., Awaitable[Life]]


@pytest.fixture
async def begin(eventually: Eventually) -> AsyncIterator[Begin]:
    """`await begin(itl_s=…, grace_s=…)` starts a worker."""
    lives: list[Life] = []

    async def start(
        itl_s: float = 0.002,
        engine: SimulatedEngine | None = None,
        deadlines: WorkerDeadlines | None = None,
        **config: Any,
    ) -> Life:
        stream, bus, stop, hurried = MemoryStream(), MemoryBus(), asyncio.Event(), asyncio.Event()
        engine = engine or SimulatedEngine(EngineShape(), ConstantTiming(itl_s=itl_s))
        worker = InferenceWorker(
            WorkerConfig(name="w0", instance="i1", **config),
            engine,
            MemoryJournal(stream, "worker:w0"),
            bus,
            deadlines=deadlines,
        )
        life = Life(worker, stream, bus, stop, hurried, asyncio.ensure_future(worker.run(stop, hurried)))
        lives.append(life)
        await eventually(lambda: bus.entries or life.running.done())  # it has subscribed, or never will
        return life

    yield start
    for life in lives:
        if not life.running.done():
            await life.end()
