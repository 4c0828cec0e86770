"""The facts by which a worker reports the adapters of its engine."""

from dataclasses import replace

from memory_journal import MemoryJournal, MemoryStream
from worker_life import ABOUT, Begin, begin

from events.observations import AdaptersChanged, WorkerJoined
from workers.config.settings import WorkerConfig
from workers.control.membership import CHANGE_INTERVAL_S, AdapterReport
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape

__all__ = ["begin"]


async def test_a_registration_has_the_adapters_and_no_fact_repeats_them(begin: Begin) -> None:
    life = await begin(engine=SimulatedEngine(EngineShape(adapters=("sql",))))
    [joined] = [fact for fact in life.facts if isinstance(fact, WorkerJoined)]
    assert joined.adapters == ("sql",)
    await life.end()
    assert not any(isinstance(fact, AdaptersChanged) for fact in life.facts)


def test_a_server_that_flaps_causes_one_fact_per_interval_with_the_newest_list() -> None:
    stream, engine = MemoryStream(), SimulatedEngine(EngineShape())
    report = AdapterReport(WorkerConfig(name="w0", instance="i1"), engine, MemoryJournal(stream, "worker:w0"))
    report.registered(())
    for now in range(round(3 * CHANGE_INTERVAL_S)):
        engine.identity = replace(engine.identity, adapters=(f"a{now}",))
        report.look(float(now))
    expected = [f"a{round(CHANGE_INTERVAL_S) * n}" for n in range(3)]
    assert [event.fact for event in stream.events] == [
        AdaptersChanged(**ABOUT, adapters=(adapter,)) for adapter in expected
    ]


def test_a_change_back_within_the_interval_is_not_reported() -> None:
    stream, engine = MemoryStream(), SimulatedEngine(EngineShape(adapters=("sql",)))
    report = AdapterReport(WorkerConfig(name="w0", instance="i1"), engine, MemoryJournal(stream, "worker:w0"))
    report.registered(("sql",))
    report.look(0.0)
    assert stream.events == []
