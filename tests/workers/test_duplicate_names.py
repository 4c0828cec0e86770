"""Two workers of one name: the newcomer is refused with an error, and the first one keeps serving."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from memory_journal import MemoryJournal
from worker_life import Begin, Life

from events import subjects
from events.observations import WorkerAwaited, WorkerJoined
from workers.config.settings import WorkerConfig
from workers.control.membership import NameTaken
from workers.engines.engine import Announce, Deliver, discard_events
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.worker import InferenceWorker

Eventually = Callable[..., Awaitable[None]]


class LoadingEngine(SimulatedEngine):
    """An engine that loads until the test sets `loaded`."""

    def __init__(self) -> None:
        super().__init__(EngineShape(), ConstantTiming())
        self.loads, self.loaded, self.stopped = False, asyncio.Event(), False

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        self.loads = True
        await self.loaded.wait()
        await super().start(deliver, announce)

    async def stop(self) -> None:
        self.stopped = True
        await super().stop()


def newcomer(life: Life, name: str, check_s: float, engine: SimulatedEngine | None = None) -> InferenceWorker:
    """Return a second worker of a life's fleet."""
    config = WorkerConfig(name=name, instance="i2", name_check_s=check_s)
    engine = engine or SimulatedEngine(EngineShape(), ConstantTiming())
    return InferenceWorker(config, engine, MemoryJournal(life.stream, f"worker:{name}"), life.bus)


async def test_a_second_worker_of_a_live_name_does_not_register(begin: Begin) -> None:
    """The refusal names the serving instance and is recorded on the journal, so that an alert can fire."""
    life = await begin()
    with pytest.raises(
        NameTaken, match=r"another live worker is named w0 \(instance i1\); it stays in service"
    ):
        async with asyncio.timeout(10):
            await newcomer(life, "w0", 20.0).run(asyncio.Event())
    assert [fact.instance for fact in life.facts if isinstance(fact, WorkerJoined)] == ["i1"]
    (refusal,) = [fact for fact in life.facts if isinstance(fact, WorkerAwaited)]
    assert (refusal.worker, refusal.instance, refusal.name_taken_by) == ("w0", "i2", "i1")
    assert not life.running.done()


@pytest.mark.parametrize("reachable", [True, False])
async def test_of_two_workers_that_load_at_the_same_time_the_second_does_not_register(
    begin: Begin, eventually: Eventually, reachable: bool
) -> None:
    """Neither sends heartbeats while it loads. The second one receives the first one's before it registers, even if the
    broker reconnected late."""
    engines = LoadingEngine(), LoadingEngine()
    life = await begin(engine=engines[0], name_check_s=0.05)
    life.bus.reachable = reachable
    second = asyncio.ensure_future(
        newcomer(life, "w0", 0.05 if reachable else 20.0, engines[1]).run(life.stop)
    )
    await eventually(lambda: all(engine.loads for engine in engines))
    life.bus.reachable = True
    engines[0].loaded.set()
    await eventually(lambda: life.beats)
    engines[1].loaded.set()
    with pytest.raises(NameTaken, match=r"another live worker is named w0 \(instance i1\)"):
        async with asyncio.timeout(20):
            await second
    assert [fact.instance for fact in life.facts if isinstance(fact, WorkerJoined)] == ["i1"]
    assert engines[1].stopped and not life.running.done()
    assert subjects.beat("w0") not in [subject for subject, _ in life.bus.entries]


async def test_a_silent_worker_does_not_hold_its_name(begin: Begin) -> None:
    """A life that hangs or is cut off sends no heartbeats: its successor may start."""
    life = await begin()
    life.worker.server.connections.blackhole(True)
    second, stop = newcomer(life, "w0", 0.2), asyncio.Event()
    running = asyncio.ensure_future(second.run(stop))
    async with asyncio.timeout(20):
        await second.serving.wait()
    stop.set()
    assert await running == 0


async def test_a_unique_name_is_not_refused(begin: Begin) -> None:
    """Other workers' heartbeats do not matter for this name; without a broker nothing can be checked."""
    life = await begin()
    for reachable in (True, False):
        second, stop = newcomer(life, "w1", 0.2), asyncio.Event()
        life.bus.reachable = reachable
        running = asyncio.ensure_future(second.run(stop))
        async with asyncio.timeout(20):
            await second.serving.wait()
        stop.set()
        assert await running == 0
    life.bus.reachable = True
