"""Heartbeats have a budget per worker, checked before decoding; a worker that exceeds it is reported."""

from memory_bus import MemoryBus

from controller.adapters.clock import SystemClock
from controller.runtime.beats import Beats
from events import subjects
from events.intrusion.send_budget import traffic

AT = "2026-01-01T00:00:00+00:00"


async def test_a_flood_of_heartbeats_is_dropped_and_reported_while_others_are_heard() -> None:
    bus, floods = MemoryBus(), list[str]()
    beats = Beats(SystemClock(), traffic(1e-9, 5, 1.0, 1.0))
    beats.flooded = floods.append
    await beats.start(bus)
    for _ in range(8):
        await bus.publish(subjects.beat("w0"), {"worker": "w0", "instance": "i0", "at": AT})
    await bus.publish(subjects.beat("w1"), {"worker": "w1", "instance": "i1", "at": AT})
    assert (floods, beats.bad) == (["w0"], 3), "there is one report for any number of dropped beats"
    assert set(beats.lives) == {("w0", "i0"), ("w1", "i1")}


async def test_one_heartbeat_of_a_megabyte_is_not_decoded() -> None:
    bus, floods = MemoryBus(), list[str]()
    beats = Beats(SystemClock())
    beats.flooded = floods.append
    await beats.start(bus)
    load = {f"name-{n}": n for n in range(100_000)}
    await bus.publish(subjects.beat("w0"), {"worker": "w0", "instance": "i0", "at": AT, "load": load})
    assert floods == ["w0"] and not beats.lives
