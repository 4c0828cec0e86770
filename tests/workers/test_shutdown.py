"""The three ends of a worker: graceful, killed, and after a failure."""

import asyncio
import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from engine_contract import prompt
from memory_journal import MemoryJournal, MemoryStream
from plain_frontend import PlainFrontend
from worker_life import ABOUT, Begin, Eventually, Life
from worker_process import START_S, Process, Spawn

from events import subjects
from events.observations import DrainFinished, EngineFaulted, ShutdownBegan, WorkerLeft
from events.process.presence import present
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.fleet_links import FleetLinks
from workers.runtime import Alone, end_after
from workers.shutdown import Stop, budget_s
from workers.worker import WorkerDeadlines

LAST = "Last endpoint completed, notifying all waiters"
COMPLETE = "DistributedRuntime shutdown complete"


def ended_elsewhere(frontend: PlainFrontend, stream: int) -> bool:
    end = frontend.end(stream)
    return end is not None and (end.error or "").startswith("engine_shutdown")


async def serving(spawn: Spawn, eventually: Eventually, *flags: str) -> tuple[Process, PlainFrontend]:
    process = await spawn(*flags)
    await eventually(lambda: process.ready, START_S)
    return process, await PlainFrontend.connect(process.port())


async def test_a_hurry_at_the_end_of_the_grace_period_changes_nothing(begin: Begin) -> None:
    life, wrong = await begin(grace_s=0.0), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    frontend = await PlainFrontend.connect(life.port)
    stream = frontend.ask(prompt(), max_tokens=10_000)
    await frontend.until(lambda: frontend.tokens(stream))
    life.hurried.set()
    assert await life.end() == 0
    assert ended_elsewhere(frontend, stream)
    assert wrong == []


# --- the budget


@pytest.mark.parametrize(
    ("grace", "orchestrator", "pre_stop", "budget"),
    [
        (60, None, 15, 60),
        (60, 60, 15, 40),  # KServe's recipe, with our cleanup inside
        (60, 30, 0, 25),  # the default of Kubernetes and ECS
        (60, 10, 0, 5),  # Docker
        (20, 60, 0, 20),
        (60, 10, 30, 0),
    ],
)
def test_the_grace_period_fits_into_the_orchestrators(
    grace: float, orchestrator: float | None, pre_stop: float, budget: float
) -> None:
    assert budget_s(grace, orchestrator, pre_stop) == budget


async def test_an_orchestrators_grace_period_is_applied_and_recorded(
    spawn: Spawn, eventually: Eventually
) -> None:
    flags = ("--grace-s", "60", "--orchestrator-grace-s", "20.5", "--pre-stop", "15")
    process, frontend = await serving(spawn, eventually, "--itl-ms", "10", *flags)
    stream = frontend.ask(prompt(), max_tokens=20_000)
    await frontend.until(lambda: frontend.tokens(stream))
    process.inner.send_signal(signal.SIGTERM)
    await frontend.answer(stream)
    assert ended_elsewhere(frontend, stream)
    assert await process.ended() == 0
    assert any('"grace_s": 0.5' in line for line in process.lines)
    frontend.transport.abort()


# --- graceful


async def test_the_phases_are_logged_with_the_texts_of_the_seed(spawn: Spawn, eventually: Eventually) -> None:
    process, frontend = await serving(spawn, eventually, "--itl-ms", "2", "--name", "w8")
    await eventually(lambda: present(process.data), START_S)
    stream = frontend.ask(prompt(), max_tokens=400)
    await frontend.until(lambda: frontend.tokens(stream))
    process.inner.send_signal(signal.SIGTERM)
    assert len(await frontend.answer(stream)) == 400
    assert await process.ended() == 0
    words = ("Active graceful endpoints", LAST, COMPLETE)
    assert [event for event in process.events if event.startswith(words)] == [
        "Active graceful endpoints: 2",
        "Active graceful endpoints: 1",
        LAST,
        COMPLETE,
    ]
    assert not list((process.data / "run").iterdir()), "its presence file is removed"


@pytest.mark.slow
async def test_requests_under_way_are_served_and_later_ones_refused(begin: Begin) -> None:
    life = await begin()
    frontend = await PlainFrontend.connect(life.port)
    long = frontend.ask(prompt(), max_tokens=2_000)
    await frontend.until(lambda: frontend.tokens(long))
    life.stop.set()
    await frontend.until(
        lambda: frontend.beats and frontend.beats[-1].draining
    )  # it routes nothing from now on
    assert len(await frontend.answer(frontend.ask(prompt(salt=1)))) == 16
    late: list[int] = []
    async with asyncio.timeout(20):
        while not (late and ended_elsewhere(frontend, late[-1])):
            late.append(frontend.ask(prompt(salt=2), max_tokens=1))
            await frontend.answer(late[-1])
    assert len(await frontend.answer(long)) == 2_000
    assert await life.end() == 0
    assert life.facts[2] == DrainFinished(**ABOUT, completed=1 + len(late), migrated=0)


@pytest.mark.slow
async def test_decoding_streams_continue_elsewhere_at_once_if_the_shutdown_is_not_graceful(
    spawn: Spawn, eventually: Eventually
) -> None:
    flags = ("--no-graceful-shutdown", "--itl-ms", "5", "--prefill-tokens-per-s", "30")
    process, frontend = await serving(spawn, eventually, *flags)
    decoding = frontend.ask(prompt(8), max_tokens=20_000)
    await frontend.until(lambda: frontend.tokens(decoding))
    prefilling = frontend.ask(prompt(60, salt=1), max_tokens=20_000)
    await frontend.until(lambda: frontend.beats and frontend.beats[-1].phase == "prefill")
    process.inner.send_signal(signal.SIGTERM)
    await frontend.answer(decoding)
    assert ended_elsewhere(frontend, decoding)
    assert not frontend.chunks(prefilling), "it is still in prefill"
    assert await frontend.answer(prefilling), "its prefill was waited for, and is not lost"
    assert ended_elsewhere(frontend, prefilling)
    assert await process.ended() == 0
    assert [event for event in process.events if event.startswith("Active")] == [
        "Active graceful endpoints: 1"
    ]
    assert LAST in process.events
    frontend.transport.abort()


async def test_a_shutdown_that_is_not_graceful_waits_for_streams_that_cannot_move(begin: Begin) -> None:
    life = await begin(graceful_shutdown=False, migration_limit=0)
    frontend = await PlainFrontend.connect(life.port)
    stream = frontend.ask(prompt(), max_tokens=400)
    await frontend.until(lambda: frontend.tokens(stream))
    assert await life.end() == 0
    assert len(frontend.tokens(stream)) == 400
    frontend.transport.abort()


@pytest.mark.slow
async def test_further_signals_are_ignored(spawn: Spawn, eventually: Eventually) -> None:
    process, frontend = await serving(spawn, eventually, "--itl-ms", "5")
    stream = frontend.ask(prompt(), max_tokens=200)
    await frontend.until(lambda: frontend.tokens(stream))
    process.inner.send_signal(signal.SIGTERM)
    await eventually(lambda: "shutdown_began" in process.events)
    for number in (signal.SIGTERM, signal.SIGINT):
        process.inner.send_signal(number)
    assert len(await frontend.answer(stream)) == 200
    assert await process.ended() == 0
    assert process.events.count("shutdown_began") == 1
    assert "signal_ignored" in process.events


async def test_b30_a_second_signal_ends_the_grace_period_if_configured(
    spawn: Spawn, eventually: Eventually
) -> None:
    process, frontend = await serving(spawn, eventually, "--itl-ms", "10", "--second-signal", "hurry")
    stream = frontend.ask(prompt(), max_tokens=20_000)
    await frontend.until(lambda: frontend.tokens(stream))
    process.inner.send_signal(signal.SIGTERM)
    await eventually(lambda: "shutdown_began" in process.events)
    process.inner.send_signal(signal.SIGTERM)
    await frontend.answer(stream)
    assert ended_elsewhere(frontend, stream)
    assert await process.ended() == 0
    assert LAST not in process.events and COMPLETE in process.events
    frontend.transport.abort()


async def test_an_operator_can_stop_a_worker_gracefully_over_the_bus(begin: Begin) -> None:
    life = await begin()
    answer = await life.bus.request(subjects.command("stop", "w0"), {"instance": "i0"})
    assert "i0 is gone" in str(answer["error"])
    answer = await life.bus.request(subjects.command("stop", "w0"), {"instance": "i1"})
    assert answer == {"stopping": True, "in_flight": 0}
    async with asyncio.timeout(20):
        assert await life.running == 0
    assert life.facts[1] == ShutdownBegan(**ABOUT, mode="graceful", grace_s=60.0, reason="operator")


async def test_a_command_that_arrives_after_its_deadline_is_refused(begin: Begin) -> None:
    life = await begin()
    over = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    later = (datetime.now(UTC) + timedelta(seconds=60)).isoformat()
    for subject, body in (
        (subjects.command("stop", "w0"), {"instance": "i1"}),
        (subjects.command("chaos", "w0"), {"fault": "die"}),
    ):
        answer = await life.bus.request(subject, {**body, "until": over})
        assert "arrived after its deadline" in str(answer["error"])
    assert not life.running.done()
    assert (await life.bus.request(subjects.command("stop", "w0"), {"instance": "i1", "until": later}))[
        "stopping"
    ]
    async with asyncio.timeout(20):
        assert await life.running == 0


# --- immediate


async def test_a_killed_worker_exits_with_137_and_its_streams_are_cut(
    spawn: Spawn, eventually: Eventually
) -> None:
    process, frontend = await serving(spawn, eventually, "--itl-ms", "10")
    stream = frontend.ask(prompt(), max_tokens=20_000)
    await frontend.until(lambda: frontend.tokens(stream))
    process.inner.kill()
    await frontend.lost()
    assert await process.ended() == -signal.SIGKILL
    assert frontend.end(stream) is None
    assert not present(process.data)


# --- self-initiated


class Failing(SimulatedEngine):
    """An engine with parts that fail on demand."""

    def __init__(self) -> None:
        super().__init__(EngineShape())
        self.check_fails: Exception | None = None
        self.check_hangs = False
        self.load_fails = False

    async def check(self) -> None:
        if self.check_hangs:
            await asyncio.Event().wait()
        if self.check_fails:
            raise self.check_fails

    def load(self) -> Any:
        if self.load_fails:
            raise ZeroDivisionError("a bug")
        return super().load()


async def failure_reason(life: Life) -> str:
    """Wait until the worker has failed; return the reason that it recorded."""
    async with asyncio.timeout(20):
        assert await life.running == 1
    began = life.facts[-3]
    assert isinstance(began, ShutdownBegan) and began.mode == "self_initiated"
    assert life.facts[-1] == WorkerLeft(**ABOUT, mode="self_initiated", exit=1)
    return began.reason


class StuckJournal(MemoryJournal):
    """A journal with a disconnected broker: a flush lasts as long as it may."""

    def __init__(self) -> None:
        super().__init__(MemoryStream(), "worker:w0")
        self.flushed: list[float] = []
        self.closed = False

    async def flush(self, deadline_s: float) -> bool:
        self.flushed.append(deadline_s)
        return False

    async def close(self) -> None:
        self.closed = True


async def test_b30_facts_are_flushed_for_half_a_second_before_the_process_ends() -> None:
    """A fatal error ends the process only after its facts had 0.5 s to be published."""
    journal = StuckJournal()
    await FleetLinks(journal, None).close()
    assert (journal.flushed, journal.closed) == ([0.5], True)


async def test_a_failed_monitor_ends_the_worker_without_an_engine_fault(begin: Begin) -> None:
    engine = Failing()
    life = await begin(engine=engine)
    engine.check_fails = RuntimeError("a bug")
    assert "watch failed: RuntimeError('a bug')" in await failure_reason(life)
    assert not [fact for fact in life.facts if isinstance(fact, EngineFaulted)]


async def test_an_engine_that_does_not_answer_its_check_is_dead(begin: Begin) -> None:
    engine = Failing()
    engine.check_hangs = True
    life = await begin(engine=engine, deadlines=WorkerDeadlines(check_s=0.05))
    assert await failure_reason(life) == "the engine's health check did not answer within 0.05 s"
    assert [fact.fatal for fact in life.facts if isinstance(fact, EngineFaulted)] == [True]


async def test_a_failed_callback_of_the_loop_ends_the_worker(begin: Begin) -> None:
    life = await begin()
    failed: dict[str, object] = {"message": "", "handle": None, "exception": ZeroDivisionError("a bug")}
    end_after(failed, Alone(life.worker, Stop(), lambda config: life.worker))
    assert "a callback of the event loop failed: ZeroDivisionError" in await failure_reason(life)


async def test_a_failed_heartbeat_ends_the_worker(begin: Begin) -> None:
    engine = Failing()
    life = await begin(engine=engine)
    engine.load_fails = True
    assert "ZeroDivisionError" in await failure_reason(life)


async def test_an_engine_that_dies_during_the_drain_ends_the_drain(begin: Begin) -> None:
    life = await begin(itl_s=0.01)
    frontend = await PlainFrontend.connect(life.port)
    stream = frontend.ask(prompt(), max_tokens=20_000)
    await frontend.until(lambda: frontend.tokens(stream))
    life.stop.set()
    await frontend.until(lambda: frontend.beats and frontend.beats[-1].draining)
    life.worker.engine.chaos("die", 0)
    assert "died" in await failure_reason(life)
    assert DrainFinished(**ABOUT, completed=0, migrated=1) in life.facts
    frontend.transport.abort()
