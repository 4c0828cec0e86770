"""Many workers in one process: what strikes one of them does not strike the others, and it comes back."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from engine_contract import prompt
from plain_frontend import PlainFrontend
from worker_life import Eventually

from events import subjects
from events.fact import Fact
from events.journal.memory import MemoryJournal, MemoryStream
from events.nats.bus import MemoryBus, NoAnswer
from events.observations import DrainFinished, EngineFaulted, ShutdownBegan, WorkerJoined, WorkerLeft
from workers.admin import server as admin
from workers.config.worker import WorkerConfig
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.exits import FELL, KILLED
from workers.listening import listening
from workers.many import BackOff, Many
from workers.shutdown import Stop
from workers.worker import InferenceWorker


@dataclass
class House:
    """Three workers, w0 to w2, in the test's own process, and what the fleet hears of them."""

    many: Many
    stream: MemoryStream
    bus: MemoryBus
    stop: Stop
    running: asyncio.Task[int]

    def facts(self, worker: str) -> list[Fact]:
        return [event.fact for event in self.stream.events if getattr(event.fact, "worker", "") == worker]

    def lives(self, worker: str) -> list[str]:
        return [fact.instance for fact in self.facts(worker) if isinstance(fact, WorkerJoined)]

    def beats(self, worker: str) -> int:
        return sum(subject == subjects.beat(worker) for subject, _ in self.bus.said)

    async def chaos(self, worker: str, fault: str) -> Any:
        return await self.bus.request(subjects.chaos(worker), {"fault": fault}, 0.2)

    async def connect(self, number: int) -> PlainFrontend:
        return await PlainFrontend.connect(self.many.workers[number].server.address[1])

    async def end(self) -> int:
        self.stop.signalled()
        async with asyncio.timeout(20):
            return await self.running


def build(configs: list[WorkerConfig], back_off: BackOff | None = None) -> House:
    stream, bus, stop = MemoryStream(), MemoryBus(), Stop()
    journal = MemoryJournal(stream, "worker:w0")

    def make(config: WorkerConfig) -> InferenceWorker:
        return InferenceWorker(
            config, SimulatedEngine(EngineShape(), ConstantTiming(itl_s=0.005)), journal, bus
        )

    house = Many(configs, make, journal, stop, back_off=back_off)
    return House(house, stream, bus, stop, asyncio.ensure_future(house.run()))


def configured(number: int, **more: Any) -> WorkerConfig:
    return WorkerConfig(name=f"w{number}", instance=f"i{number}", grace_s=5.0, shares_process=True, **more)


@pytest.fixture
async def house(eventually: Eventually, request: pytest.FixtureRequest) -> AsyncIterator[House]:
    back_off = getattr(request, "param", BackOff(wait_s_min=0.02))
    house = build([configured(number) for number in range(3)], back_off)
    await eventually(lambda: len(house.bus.entries) == 3)
    yield house
    if not house.running.done():
        await house.end()


async def test_a_killed_one_is_gone_without_a_word_and_its_successor_joins(
    house: House, eventually: Eventually
) -> None:
    struck, spared = await house.connect(1), await house.connect(2)
    streams = [frontend.ask(prompt(), max_tokens=100) for frontend in (struck, spared)]
    await struck.until(lambda: struck.tokens(streams[0]))
    assert await house.chaos("w1", "kill") == {"fault": "kill", "argument": 0.0, "rank": 0}
    await struck.lost()
    assert struck.end(streams[0]) is None
    await eventually(lambda: len(house.lives("w1")) == 2)
    joined, left, again = house.facts("w1")
    assert left == WorkerLeft(worker="w1", instance="i1", mode="immediate", exit=KILLED)
    assert isinstance(joined, WorkerJoined)
    assert isinstance(again, WorkerJoined)
    assert again.instance != "i1"
    frontend = await house.connect(1)
    assert len(await frontend.answer(frontend.ask(prompt()))) == 16
    assert len(await spared.answer(streams[1])) == 100
    assert house.lives("w0") == ["i0"]
    assert house.lives("w2") == ["i2"]


async def test_the_successor_alone_hears_what_the_worker_is_told(
    house: House, eventually: Eventually
) -> None:
    await house.chaos("w0", "kill")
    await eventually(lambda: len(house.lives("w0")) == 2 and len(house.bus.entries) == 3)
    answer = await house.bus.request(subjects.drain("w0"), {"instance": "i0"})
    assert "i0 is gone" in str(answer["error"])
    answer = await house.bus.request(subjects.drain("w0"), {"instance": house.lives("w0")[1]})
    assert answer == {"draining": True, "in_flight": 0}


async def test_a_hung_one_says_and_obeys_nothing_until_it_is_let_go_on(
    house: House, eventually: Eventually
) -> None:
    frontend = await house.connect(0)
    stream = frontend.ask(prompt(), max_tokens=10_000)
    await frontend.until(lambda: frontend.tokens(stream))
    await house.chaos("w0", "hang")
    beats, heard = house.beats("w0"), len(frontend.tokens(stream))
    others = house.beats("w1")
    for subject in (subjects.drain("w0"), subjects.chaos("w0")):
        with pytest.raises(NoAnswer):
            await house.bus.request(subject, {"fault": "slow"}, 0.1)
    await eventually(lambda: house.beats("w1") > others + 1)
    assert (house.beats("w0"), len(frontend.tokens(stream))) == (beats, heard)
    await house.chaos("w0", "unhang")
    await eventually(lambda: house.beats("w0") > beats)
    again = await house.connect(0)
    assert len(await again.answer(again.ask(prompt()))) == 16


async def test_a_hang_and_a_blackhole_end_each_at_its_own_time(house: House, eventually: Eventually) -> None:
    server = house.many.workers[0].server
    await house.bus.request(subjects.chaos("w0"), {"fault": "blackhole"})
    await house.bus.request(subjects.chaos("w0"), {"fault": "hang", "duration": 0.05})
    await eventually(lambda: not house.many.workers[0].faults.hung)
    assert server.blackholed
    await house.bus.request(subjects.chaos("w0"), {"fault": "blackhole", "duration": 0.05})
    await house.chaos("w0", "hang")
    await asyncio.sleep(0.1)
    assert server.blackholed, "a hung one says nothing, whatever else has healed"
    await house.chaos("w0", "unhang")
    assert not server.blackholed


async def test_a_hung_one_can_be_killed(house: House, eventually: Eventually) -> None:
    await house.chaos("w0", "hang")
    await house.chaos("w0", "kill")
    await eventually(lambda: len(house.lives("w0")) == 2 and len(house.bus.entries) == 3)
    newest = {"instance": house.lives("w0")[1]}
    assert (await house.bus.request(subjects.resume("w0"), newest))["draining"] is False


async def test_a_hung_one_that_the_fleet_holds_for_dead_ends_and_comes_back(
    house: House, eventually: Eventually
) -> None:
    await house.chaos("w0", "hang")
    assert await house.bus.request(subjects.retire("w0"), {"instance": "i0"}) == {"retired": True}
    await eventually(lambda: len(house.lives("w0")) == 2 and len(house.bus.entries) == 3)
    newest = {"instance": house.lives("w0")[1]}
    assert (await house.bus.request(subjects.resume("w0"), newest))["draining"] is False
    assert house.lives("w1") == ["i1"]


async def test_a_hung_one_can_be_healed(house: House) -> None:
    await house.chaos("w0", "hang")
    await house.chaos("w0", "heal")
    assert not house.many.workers[0].faults.hung
    assert not house.many.workers[0].server.blackholed


async def test_one_whose_engine_dies_falls_alone(house: House, eventually: Eventually) -> None:
    await house.chaos("w2", "die")
    await eventually(lambda: len(house.lives("w2")) == 2)
    said = [type(fact) for fact in house.facts("w2")[1:-1]]
    assert said == [EngineFaulted, ShutdownBegan, DrainFinished, WorkerLeft]
    assert house.lives("w0") == ["i0"]
    assert not house.running.done()


async def test_one_that_is_restarted_leaves_in_good_order_and_comes_back(
    house: House, eventually: Eventually
) -> None:
    assert (await house.bus.request(subjects.stop("w1"), {"instance": "i1"}))["stopping"] is True
    await eventually(lambda: len(house.lives("w1")) == 2)
    assert WorkerLeft(worker="w1", instance="i1", mode="graceful", exit=0) in house.facts("w1")


def health(house: House) -> tuple[int, str, dict[str, str]]:
    answer = admin.health(house.many.workers, house.many.stopping())
    said = msgspec.json.decode(answer.body)
    return answer.status, said["status"], said["workers"]


@pytest.mark.parametrize("house", [BackOff(wait_s_min=3600.0, settled_s=0.0)], indirect=True)
async def test_health_says_of_one_between_two_lives_that_it_restarts(
    house: House, eventually: Eventually
) -> None:
    serving = dict.fromkeys(("w0", "w1", "w2"), "serving")
    assert health(house) == (200, "healthy", serving)
    await house.chaos("w1", "die")
    await eventually(lambda: len(house.facts("w1")) == 5)  # it has left
    assert health(house) == (200, "degraded", serving | {"w1": "restarting"})
    await house.bus.request(subjects.drain("w0"), {"instance": "i0"})
    assert health(house) == (200, "degraded", serving | {"w0": "draining", "w1": "restarting"})
    for worker in ("w0", "w2"):
        await house.chaos(worker, "kill")
    await eventually(lambda: not any(worker.serving.is_set() for worker in house.many.workers))
    assert health(house) == (503, "not_ready", dict.fromkeys(serving, "restarting"))
    await house.end()
    assert health(house)[:2] == (503, "shutting_down")


async def test_health_says_when_the_process_breaks(house: House, eventually: Eventually) -> None:
    house.many.fail(ZeroDivisionError("a mistake of ours"))
    await eventually(lambda: not any(worker.serving.is_set() for worker in house.many.workers))
    assert health(house)[:2] == (503, "shutting_down")


async def test_when_the_process_stops_all_of_them_leave(house: House) -> None:
    assert await house.end() == 0
    left = [event.fact for event in house.stream.events if isinstance(event.fact, WorkerLeft)]
    assert sorted((fact.worker, fact.mode) for fact in left) == [(f"w{n}", "graceful") for n in range(3)]


async def test_an_error_in_a_callback_ends_all_of_them(house: House) -> None:
    house.many.fail(ZeroDivisionError("a mistake of ours"))
    async with asyncio.timeout(20):
        assert await house.running == FELL
    left = [event.fact for event in house.stream.events if isinstance(event.fact, WorkerLeft)]
    assert [fact.mode for fact in left] == ["self_initiated"] * 3


async def test_one_that_cannot_start_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with listening("127.0.0.1", 0) as taken:
        house = build([configured(0), configured(1, port=taken.getsockname()[1])])
        async with asyncio.timeout(20):
            assert await house.running == FELL
    assert "cannot be had" in capsys.readouterr().err
