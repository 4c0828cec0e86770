"""A worker that cannot join yet records why; one that starts at once records no wait."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from memory_journal import MemoryJournal, MemoryStream
from waits import turns
from worker_life import ABOUT, Begin, begin

from events.fact import Fact
from events.observations import WorkerAwaited, WorkerJoined, WorkerLeft
from workers.config.settings import WorkerConfig
from workers.control.membership import CHANGE_INTERVAL_S, REPEAT_S, WaitReport
from workers.engines.engine import Announce, Awaits, Deliver, discard_events
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape

Eventually = Callable[..., Awaitable[None]]
__all__ = ["begin"]


class DelayedEngine(SimulatedEngine):
    """An engine that starts when the test lets it."""

    def __init__(self) -> None:
        super().__init__(EngineShape())
        self.wait: Awaits | None = Awaits("cannot connect to http://u")
        self.may_start = asyncio.Event()  # a flag

    def awaits(self) -> Any:
        return self.wait

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        await self.may_start.wait()
        await super().start(deliver, announce)


def waits(facts: list[Fact]) -> list[tuple[str, str]]:
    return [(fact.reason, fact.model) for fact in facts if isinstance(fact, WorkerAwaited)]


async def test_a_worker_records_what_it_waits_for_until_it_joins(
    begin: Begin, eventually: Eventually
) -> None:
    engine = DelayedEngine()
    starting = asyncio.ensure_future(begin(engine=engine))
    await eventually(lambda: engine.may_start is not None, 5)
    await turns()
    engine.may_start.set()
    life = await starting
    assert waits(life.facts) == [("cannot connect to http://u", "")]
    kinds = [type(fact) for fact in life.facts]
    assert kinds.index(WorkerAwaited) < kinds.index(WorkerJoined)
    assert await life.end() == 0


async def test_a_worker_that_starts_at_once_records_no_wait(begin: Begin) -> None:
    life = await begin()
    assert not waits(life.facts)
    assert await life.end() == 0
    assert not waits(life.facts)


async def test_a_wait_is_repeated_every_two_minutes_and_a_change_is_rate_limited() -> None:
    stream, engine = MemoryStream(), DelayedEngine()
    report = WaitReport(WorkerConfig(name="w0", instance="i1"), engine, MemoryJournal(stream, "worker:w0"))

    def facts() -> list[tuple[str, str]]:
        return waits([event.fact for event in stream.events])

    engine.wait = None
    report.look(0.0)
    assert not facts()
    engine.wait = Awaits("away")
    for now in (1.0, 1.1, REPEAT_S):
        report.look(now)
    assert facts() == [("away", "")]
    report.look(REPEAT_S + 1.0)
    assert facts() == [("away", "")] * 2
    engine.wait = Awaits("loading", "m")
    report.look(REPEAT_S + 1.0 + CHANGE_INTERVAL_S - 0.1)
    assert len(facts()) == 2, "a flapping reason causes a few facts a minute"
    report.look(REPEAT_S + 1.0 + CHANGE_INTERVAL_S)
    assert facts()[-1] == ("loading", "m")


async def test_a_worker_that_is_stopped_while_it_waits_is_no_longer_awaited() -> None:
    stream, engine = MemoryStream(), DelayedEngine()
    report = WaitReport(WorkerConfig(name="w0", instance="i1"), engine, MemoryJournal(stream, "worker:w0"))
    report.leave()
    assert not stream.events
    report.look(0.0)
    report.leave()
    assert stream.events[-1].fact == WorkerLeft(**ABOUT, mode="graceful", exit=0)
