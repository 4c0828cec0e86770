"""A worker that cannot join yet says so, and why; one that starts at once says nothing of it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from worker_life import ABOUT, Begin, begin

from events.fact import Fact
from events.journal.memory import MemoryJournal, MemoryStream
from events.observations import WorkerAwaited, WorkerJoined, WorkerLeft
from workers.config.worker import WorkerConfig
from workers.control.membership import AGAIN_S, CHANGED_S, WaitReport
from workers.engines.engine import Announce, Awaits, Deliver, unheard
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape

Eventually = Callable[..., Awaitable[None]]
__all__ = ["begin"]


class Patient(SimulatedEngine):
    """An engine that starts when it is let."""

    def __init__(self) -> None:
        super().__init__(EngineShape())
        self.wait: Awaits | None = Awaits("cannot connect to http://u")
        self.let = asyncio.Event()  # a flag

    def awaits(self) -> Any:
        return self.wait

    async def start(self, deliver: Deliver, announce: Announce = unheard) -> None:
        await self.let.wait()
        await super().start(deliver, announce)


def said(facts: list[Fact]) -> list[tuple[str, str]]:
    return [(fact.reason, fact.model) for fact in facts if isinstance(fact, WorkerAwaited)]


async def test_it_says_what_it_waits_for_until_it_joins(begin: Begin, eventually: Eventually) -> None:
    engine = Patient()
    starting = asyncio.ensure_future(begin(engine=engine))
    await eventually(lambda: engine.let is not None, 5)
    await asyncio.sleep(0)
    engine.let.set()
    life = await starting
    assert said(life.facts) == [("cannot connect to http://u", "")]
    kinds = [type(fact) for fact in life.facts]
    assert kinds.index(WorkerAwaited) < kinds.index(WorkerJoined)
    assert await life.end() == 0


async def test_a_worker_that_starts_at_once_is_awaited_by_nobody(begin: Begin) -> None:
    life = await begin()
    assert not said(life.facts)
    assert await life.end() == 0
    assert not said(life.facts)


async def test_the_same_is_said_every_two_minutes_and_a_change_not_too_often() -> None:
    stream, engine = MemoryStream(), Patient()
    report = WaitReport(WorkerConfig(name="w0", instance="i1"), engine, MemoryJournal(stream, "worker:w0"))

    def facts() -> list[tuple[str, str]]:
        return said([event.fact for event in stream.events])

    engine.wait = None
    report.look(0.0)
    assert not facts()
    engine.wait = Awaits("away")
    for now in (1.0, 1.1, AGAIN_S):
        report.look(now)
    assert facts() == [("away", "")]
    report.look(AGAIN_S + 1.0)
    assert facts() == [("away", "")] * 2
    engine.wait = Awaits("loading", "m")
    report.look(AGAIN_S + 1.0 + CHANGED_S - 0.1)
    assert len(facts()) == 2, "one that flaps is a few facts a minute"
    report.look(AGAIN_S + 1.0 + CHANGED_S)
    assert facts()[-1] == ("loading", "m")


async def test_one_that_is_told_to_stop_while_it_waits_is_not_waited_for_any_longer() -> None:
    stream, engine = MemoryStream(), Patient()
    report = WaitReport(WorkerConfig(name="w0", instance="i1"), engine, MemoryJournal(stream, "worker:w0"))
    report.leave()
    assert not stream.events
    report.look(0.0)
    report.leave()
    assert stream.events[-1].fact == WorkerLeft(**ABOUT, mode="graceful", exit=0)
