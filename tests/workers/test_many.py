"""Many workers in one process: a failure of one does not affect the others, and it is restarted."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from engine_contract import prompt
from memory_bus import MemoryBus
from memory_journal import MemoryJournal, MemoryStream
from plain_frontend import PlainFrontend
from worker_life import Eventually

from events import subjects
from events.fact import Fact
from events.nats.bus import NoAnswer
from events.observations import DrainFinished, EngineFaulted, ShutdownBegan, WorkerJoined, WorkerLeft
from workers.admin import server as admin
from workers.config.settings import WorkerConfig
from workers.engines.engine import EngineChanged
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.exits import FAILED, KILLED
from workers.listen_socket import listening
from workers.shutdown import Stop
from workers.worker import InferenceWorker
from workers.worker_group import BackOff, Many


@dataclass
class SharedProcess:
    """Three workers, w0 to w2, in the test's process, and what they send to the fleet."""

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
        return await self.bus.request(subjects.command("chaos", worker), {"fault": fault}, 0.2)

    async def connect(self, number: int) -> PlainFrontend:
        return await PlainFrontend.connect(self.many.workers[number].server.address[1])

    async def end(self) -> int:
        self.stop.signalled()
        async with asyncio.timeout(20):
            return await self.running


def build(configs: list[WorkerConfig], back_off: BackOff | None = None) -> SharedProcess:
    stream, bus, stop = MemoryStream(), MemoryBus(), Stop()
    journal = MemoryJournal(stream, "worker:w0")

    def make(config: WorkerConfig) -> InferenceWorker:
        return InferenceWorker(
            config, SimulatedEngine(EngineShape(), ConstantTiming(itl_s=0.005)), journal, bus
        )

    shared = Many(configs, make, journal, stop, back_off=back_off)
    return SharedProcess(shared, stream, bus, stop, asyncio.ensure_future(shared.run()))


def configured(number: int, **more: Any) -> WorkerConfig:
    return WorkerConfig(name=f"w{number}", instance=f"i{number}", grace_s=5.0, shares_process=True, **more)


@pytest.fixture
async def shared(eventually: Eventually, request: pytest.FixtureRequest) -> AsyncIterator[SharedProcess]:
    back_off = getattr(request, "param", BackOff(wait_s_min=0.02))
    shared = build([configured(number) for number in range(3)], back_off)
    await eventually(lambda: len(shared.bus.entries) == 3)
    yield shared
    if not shared.running.done():
        await shared.end()


async def test_a_killed_worker_sends_nothing_more_and_its_successor_joins(
    shared: SharedProcess, eventually: Eventually
) -> None:
    killed, spared = await shared.connect(1), await shared.connect(2)
    streams = [frontend.ask(prompt(), max_tokens=100) for frontend in (killed, spared)]
    await killed.until(lambda: killed.tokens(streams[0]))
    assert await shared.chaos("w1", "kill") == {"fault": "kill", "argument": 0.0, "rank": 0}
    await killed.lost()
    assert killed.end(streams[0]) is None
    await eventually(lambda: len(shared.lives("w1")) == 2)
    joined, left, again = shared.facts("w1")
    assert left == WorkerLeft(worker="w1", instance="i1", mode="immediate", exit=KILLED)
    assert isinstance(joined, WorkerJoined)
    assert isinstance(again, WorkerJoined)
    assert again.instance != "i1"
    frontend = await shared.connect(1)
    assert len(await frontend.answer(frontend.ask(prompt()))) == 16
    assert len(await spared.answer(streams[1])) == 100
    assert shared.lives("w0") == ["i0"]
    assert shared.lives("w2") == ["i2"]


async def test_only_the_successor_receives_the_workers_commands(
    shared: SharedProcess, eventually: Eventually
) -> None:
    await shared.chaos("w0", "kill")
    await eventually(lambda: len(shared.lives("w0")) == 2 and len(shared.bus.entries) == 3)
    answer = await shared.bus.request(subjects.command("drain", "w0"), {"instance": "i0"})
    assert "i0 is gone" in str(answer["error"])
    answer = await shared.bus.request(subjects.command("drain", "w0"), {"instance": shared.lives("w0")[1]})
    assert answer == {"draining": True, "in_flight": 0}


async def test_a_hung_worker_sends_and_handles_nothing_until_it_is_released(
    shared: SharedProcess, eventually: Eventually
) -> None:
    frontend = await shared.connect(0)
    stream = frontend.ask(prompt(), max_tokens=10_000)
    await frontend.until(lambda: frontend.tokens(stream))
    await shared.chaos("w0", "hang")
    beats, received = shared.beats("w0"), len(frontend.tokens(stream))
    others = shared.beats("w1")
    for subject in (subjects.command("drain", "w0"), subjects.command("chaos", "w0")):
        with pytest.raises(NoAnswer):
            await shared.bus.request(subject, {"fault": "slow"}, 0.1)
    await eventually(lambda: shared.beats("w1") > others + 1)
    assert (shared.beats("w0"), len(frontend.tokens(stream))) == (beats, received)
    await shared.chaos("w0", "unhang")
    await eventually(lambda: shared.beats("w0") > beats)
    again = await shared.connect(0)
    assert len(await again.answer(again.ask(prompt()))) == 16


async def test_a_hang_and_a_blackhole_each_end_after_their_own_duration(
    shared: SharedProcess, eventually: Eventually
) -> None:
    server = shared.many.workers[0].server
    await shared.bus.request(subjects.command("chaos", "w0"), {"fault": "blackhole"})
    await shared.bus.request(subjects.command("chaos", "w0"), {"fault": "hang", "duration": 0.05})
    await eventually(lambda: not shared.many.workers[0].faults.hung)
    assert server.connections.blackholed
    await shared.bus.request(subjects.command("chaos", "w0"), {"fault": "blackhole", "duration": 0.05})
    await shared.chaos("w0", "hang")
    await shared.bus.request(
        subjects.command("chaos", "w1"), {"fault": "blackhole", "duration": 0.05}
    )  # ends after that of w0
    other = shared.many.workers[1].server.connections
    assert other.blackholed
    await eventually(lambda: not other.blackholed)
    assert server.connections.blackholed, "a hung worker sends nothing, whatever else has healed"
    await shared.chaos("w0", "unhang")
    assert not server.connections.blackholed


async def test_a_hung_worker_can_be_killed(shared: SharedProcess, eventually: Eventually) -> None:
    await shared.chaos("w0", "hang")
    await shared.chaos("w0", "kill")
    await eventually(lambda: len(shared.lives("w0")) == 2 and len(shared.bus.entries) == 3)
    newest = {"instance": shared.lives("w0")[1]}
    assert (await shared.bus.request(subjects.command("resume", "w0"), newest))["draining"] is False


async def test_a_hung_worker_that_is_considered_dead_ends_and_is_restarted(
    shared: SharedProcess, eventually: Eventually
) -> None:
    await shared.chaos("w0", "hang")
    assert await shared.bus.request(subjects.command("retire", "w0"), {"instance": "i0"}) == {"retired": True}
    await eventually(lambda: len(shared.lives("w0")) == 2 and len(shared.bus.entries) == 3)
    newest = {"instance": shared.lives("w0")[1]}
    assert (await shared.bus.request(subjects.command("resume", "w0"), newest))["draining"] is False
    assert shared.lives("w1") == ["i1"]


async def test_a_hung_worker_can_be_healed(shared: SharedProcess) -> None:
    await shared.chaos("w0", "hang")
    await shared.chaos("w0", "heal")
    assert not shared.many.workers[0].faults.hung
    assert not shared.many.workers[0].server.connections.blackholed


async def test_a_worker_with_a_dead_engine_fails_alone(shared: SharedProcess, eventually: Eventually) -> None:
    await shared.chaos("w2", "die")
    await eventually(lambda: len(shared.lives("w2")) == 2)
    kinds = [type(fact) for fact in shared.facts("w2")[1:-1]]
    assert kinds == [EngineFaulted, ShutdownBegan, DrainFinished, WorkerLeft]
    assert shared.lives("w0") == ["i0"]
    assert not shared.running.done()


async def test_a_restarted_worker_leaves_gracefully_and_joins_again(
    shared: SharedProcess, eventually: Eventually
) -> None:
    assert (await shared.bus.request(subjects.command("stop", "w1"), {"instance": "i1"}))["stopping"] is True
    await eventually(lambda: len(shared.lives("w1")) == 2)
    assert WorkerLeft(worker="w1", instance="i1", mode="graceful", exit=0) in shared.facts("w1")


def health(shared: SharedProcess) -> tuple[int, str, dict[str, str]]:
    answer = admin.health(shared.many.workers, shared.many.stopping())
    body = msgspec.json.decode(answer.body)
    return answer.status, body["status"], body["workers"]


@pytest.mark.parametrize("shared", [BackOff(wait_s_min=3600.0, settled_s=0.0)], indirect=True)
async def test_health_reports_a_worker_between_two_lives_as_restarting(
    shared: SharedProcess, eventually: Eventually
) -> None:
    serving = dict.fromkeys(("w0", "w1", "w2"), "serving")
    assert health(shared) == (200, "healthy", serving)
    await shared.chaos("w1", "die")
    await eventually(lambda: len(shared.facts("w1")) == 5)  # it has left
    assert health(shared) == (200, "degraded", serving | {"w1": "restarting"})
    await shared.bus.request(subjects.command("drain", "w0"), {"instance": "i0"})
    assert health(shared) == (200, "degraded", serving | {"w0": "draining", "w1": "restarting"})
    for worker in ("w0", "w2"):
        await shared.chaos(worker, "kill")
    await eventually(lambda: not any(worker.serving.is_set() for worker in shared.many.workers))
    assert health(shared) == (503, "not_ready", dict.fromkeys(serving, "restarting"))
    await shared.end()
    assert health(shared)[:2] == (503, "shutting_down")


async def test_health_reports_a_process_that_has_failed(
    shared: SharedProcess, eventually: Eventually
) -> None:
    shared.many.fail(ZeroDivisionError("a bug"))
    await eventually(lambda: not any(worker.serving.is_set() for worker in shared.many.workers))
    assert health(shared)[:2] == (503, "shutting_down")


async def test_all_workers_leave_when_the_process_stops(shared: SharedProcess) -> None:
    assert await shared.end() == 0
    left = [event.fact for event in shared.stream.events if isinstance(event.fact, WorkerLeft)]
    assert sorted((fact.worker, fact.mode) for fact in left) == [(f"w{n}", "graceful") for n in range(3)]


async def test_a_worker_with_a_new_engine_identity_ends_a_stopping_process_without_an_error(
    shared: SharedProcess,
) -> None:
    shared.many.workers[0].fail(EngineChanged("the engine serves another model"))
    assert await shared.end() == 0


async def test_an_error_in_a_callback_ends_all_workers(shared: SharedProcess) -> None:
    shared.many.fail(ZeroDivisionError("a bug"))
    async with asyncio.timeout(20):
        assert await shared.running == FAILED
    left = [event.fact for event in shared.stream.events if isinstance(event.fact, WorkerLeft)]
    assert [fact.mode for fact in left] == ["self_initiated"] * 3


async def test_a_worker_that_cannot_start_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with listening("127.0.0.1", 0) as taken:
        shared = build([configured(0), configured(1, port=taken.getsockname()[1])])
        async with asyncio.timeout(20):
            assert await shared.running == FAILED
    assert "cannot listen on port" in capsys.readouterr().err
