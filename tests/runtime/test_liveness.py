"""Detection of silent workers, and of silences that are the observer's fault."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from math import inf
from typing import Any

import pytest
from canary_world import World
from memory_bus import MemoryBus

from controller.runtime.beats import Beats
from controller.runtime.liveness import NEWS, HangCheck, Liveness
from controller.runtime.settings import LivenessSettings
from events import subjects
from events.decisions import SpareActivated
from events.observations import (
    DrainRequested,
    ObserverBlind,
    RequestFailed,
    ResumeRequested,
    WorkerHeard,
    WorkerLeft,
    WorkerSilent,
)


class ObservedFleet:
    """A fleet with controlled heartbeats, and the observer."""

    def __init__(self, *names: str) -> None:
        self.world = World()
        self.bus = MemoryBus(connected_since=0.0)
        self.beats = Beats(self.world.clock)
        self.liveness = self.observer(self.world.clock)
        for name in names:
            self.world.join(name)
        self.beating = set(names)
        self.linked: dict[str, str] = {}
        self.skew = timedelta(0)

    def observer(self, clock: Any) -> Liveness:
        """Return an observer of these workers with its own clock."""
        return Liveness(
            self.world,
            self.beats,
            self.world.journal,
            self.bus,
            clock,
            LivenessSettings(),
            lambda: self.world.leads,
        )

    async def start(self) -> "ObservedFleet":
        await self.beats.start(self.bus)
        return self

    async def beat(self, name: str, **more: Any) -> None:
        body = {
            "worker": name,
            "instance": self.world.fleet.workers[name].joined.instance,
            "seq": 1,
            "load": {"running": 2, "waiting": 1},
            "draining": False,
            "at": (self.world.clock.now() + self.skew).isoformat(),
        }
        await self.bus.publish(subjects.beat(name), {**body, **more})

    async def pass_time(self, seconds: float) -> None:
        for step in range(int(seconds * 4)):
            if step % 4 == 0:
                for name in sorted(self.beating):
                    await self.beat(name)
                if self.linked:
                    body = {"frontend": "f", "at": "now", "workers": self.linked}
                    await self.bus.publish(subjects.links("f"), body)
            await self.world.clock.advance(0.25)
            self.liveness.look(self.world.clock.monotonic())
            self.world.turn()


async def test_a_worker_that_stops_beating_is_silent_after_three_seconds() -> None:
    w = await ObservedFleet("w1", "w2", "w3").start()
    await w.pass_time(10)
    assert not w.world.facts(WorkerSilent)
    w.beating.discard("w2")
    await w.pass_time(1.75)
    assert not w.world.facts(WorkerSilent)
    await w.pass_time(2)
    (silent,) = w.world.facts(WorkerSilent)
    assert silent.worker == "w2"
    assert 3.0 <= silent.silent_s <= 4.0
    assert w.world.status("w2") == "UNHEALTHY"


async def test_a_worker_that_returns_is_heard() -> None:
    w = await ObservedFleet("w1", "w2", "w3").start()
    await w.pass_time(5)
    w.beating.discard("w2")
    await w.pass_time(6)
    w.beating.add("w2")
    await w.pass_time(4)
    assert [f.worker for f in w.world.facts(WorkerHeard)] == ["w2"]
    assert len(w.world.facts(WorkerSilent)) == 1
    w.beating.discard("w2")
    await w.pass_time(6)
    assert len(w.world.facts(WorkerSilent)) == 2


async def test_a_worker_that_never_beat_is_silent_from_its_joining_on() -> None:
    w = await ObservedFleet("w1", "w2", "w3").start()
    await w.pass_time(5)
    w.world.join("w4")
    await w.pass_time(2.5)
    assert not w.world.facts(WorkerSilent)
    await w.pass_time(2)
    assert [f.worker for f in w.world.facts(WorkerSilent)] == ["w4"]


@pytest.mark.parametrize("phase", [0, 1, 2, 3])
async def test_a_simultaneous_silence_of_the_fleet_is_attributed_to_the_observer(phase: int) -> None:
    w = await ObservedFleet(*(f"w{n}" for n in range(8))).start()
    await w.pass_time(5)
    for step in range(8 + phase):  # every worker beats at its own phase of the second
        for n in range(8):
            if n % 4 == step % 4:
                await w.beat(f"w{n}")
        await w.world.clock.advance(0.25)
    w.beating.clear()
    await w.pass_time(20)
    assert not w.world.facts(WorkerSilent)
    (blind,) = w.world.facts(ObserverBlind)
    assert blind.known == 8
    assert blind.silent > 4
    w.beating = {f"w{n}" for n in range(8)} - {"w3"}
    await w.pass_time(2)
    assert not w.world.facts(WorkerSilent)  # the worker that is still unheard gets a whole window
    await w.pass_time(4)
    assert [f.worker for f in w.world.facts(WorkerSilent)] == ["w3"]


async def test_a_lone_worker_is_never_reported_silent_and_the_doubt_is_reported_once() -> None:
    """With a single worker, its silence cannot be told from our own deafness: its canaries judge it."""
    w = await ObservedFleet("w1").start()
    await w.pass_time(5)
    w.beating.clear()
    await w.pass_time(60)
    assert not w.world.facts(WorkerSilent)
    (blind,) = w.world.facts(ObserverBlind)
    assert (blind.silent, blind.known) == (1, 1)
    w.beating.add("w1")
    await w.pass_time(2)
    w.beating.clear()
    await w.pass_time(10)
    assert len(w.world.facts(ObserverBlind)) == 2


async def test_half_of_the_fleet_is_not_more_than_half() -> None:
    w = await ObservedFleet("w1", "w2", "w3", "w4").start()
    await w.pass_time(5)
    w.beating -= {"w1", "w2"}
    await w.pass_time(5)
    assert {f.worker for f in w.world.facts(WorkerSilent)} == {"w1", "w2"}


async def test_an_observer_without_a_connection_reports_nothing() -> None:
    w = await ObservedFleet("w1", "w2", "w3").start()
    await w.pass_time(5)
    w.bus.reachable = False
    await w.pass_time(30)
    w.beating.discard("w2")
    w.bus.reachable, w.bus.connected_since = True, w.world.clock.monotonic()
    await w.pass_time(2.5)
    assert not w.world.facts(WorkerSilent)
    await w.pass_time(2)
    assert [f.worker for f in w.world.facts(WorkerSilent)] == ["w2"]
    assert not w.world.facts(ObserverBlind)


async def test_an_observer_that_falls_behind_accuses_no_worker() -> None:
    w = await ObservedFleet("w1", "w2", "w3").start()
    await w.pass_time(5)
    w.beating.discard("w2")
    w.bus.unread = 10**6
    await w.pass_time(10)
    assert not w.world.facts(WorkerSilent)
    w.bus.unread = 1000
    await w.pass_time(2)
    assert not w.world.facts(WorkerSilent), "each worker gets a whole window"
    await w.pass_time(2)
    assert [fact.worker for fact in w.world.facts(WorkerSilent)] == ["w2"]


async def test_an_observer_with_a_lagging_loop_was_not_listening() -> None:
    w = await ObservedFleet("w1", "w2", "w3").start()
    await w.pass_time(5)

    class Stalled:
        """A clock with sleeps that take ten seconds longer than asked."""

        def __init__(self) -> None:
            self.calls = 0

        def now(self) -> Any:
            return w.world.clock.now()

        def monotonic(self) -> float:
            return w.world.clock.monotonic()

        async def sleep(self, seconds: float) -> None:
            self.calls += 1
            if self.calls == 2:
                raise StopAsyncIteration
            await w.world.clock.advance(seconds + 10)

    lagging = w.observer(Stalled())
    with pytest.raises(StopAsyncIteration):
        await lagging.run()
    w.world.turn()
    assert not w.world.facts(WorkerSilent)
    assert not w.world.facts(ObserverBlind)


async def test_a_frontends_live_connection_vetoes_a_silence() -> None:
    w = await ObservedFleet("w1", "w2", "w3").start()
    await w.pass_time(5)
    w.beating.discard("w2")
    w.linked = {"w2": "w2-1"}
    await w.pass_time(10)
    assert not w.world.facts(WorkerSilent)
    w.linked = {"w2": "w2-0"}  # another instance of it
    await w.pass_time(5)
    assert [f.worker for f in w.world.facts(WorkerSilent)] == ["w2"]


async def test_only_the_holder_of_the_lease_reports_and_it_knows_the_past() -> None:
    w = await ObservedFleet("w1", "w2", "w3").start()
    w.world.leads = False
    await w.pass_time(5)
    w.beating.discard("w2")
    await w.pass_time(10)
    assert not w.world.facts(WorkerSilent)
    w.world.leads = True
    await w.pass_time(0.5)
    assert [f.worker for f in w.world.facts(WorkerSilent)] == ["w2"]


async def test_beats_of_another_instance_do_not_make_a_worker_silent() -> None:
    w = await ObservedFleet("w1", "w2", "w3").start()
    for _ in range(10):
        await w.pass_time(1)
        await w.beat("w1", instance="another-instance")
        w.liveness.look(w.world.clock.monotonic())
        w.world.turn()
    assert not w.world.facts(WorkerSilent)


async def test_dead_workers_are_not_reported_silent() -> None:
    w = await ObservedFleet("w1", "w2", "w3").start()
    await w.pass_time(5)
    w.beating.discard("w2")
    w.world.journal.observe(WorkerLeft(worker="w2", instance="w2-1", mode="immediate", exit=-9))
    await w.pass_time(10)
    assert not w.world.facts(WorkerSilent)


async def test_clock_skew_is_measured_and_has_no_effect() -> None:
    w = await ObservedFleet("w1", "w2").start()
    w.skew = timedelta(hours=-2)
    await w.pass_time(10)
    assert w.beats.lives["w1", "w1-1"].skew_s == pytest.approx(-7200, abs=0.5)
    assert w.beats.lives["w1", "w1-1"].in_flight == 3
    assert not w.world.facts(WorkerSilent)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"worker": "w1"},
        {"worker": "w1", "instance": "i", "at": "noon"},
        {"worker": "w", "instance": "i", "at": 5},
        {"worker": "w2", "instance": "i", "at": "2026-01-01T00:00:00+00:00"},
    ],
)
async def test_an_invalid_beat_is_counted_and_dropped(body: dict[str, Any]) -> None:
    w = await ObservedFleet("w1").start()
    await w.bus.publish(subjects.beat("w1"), body)
    await w.bus.publish(subjects.links("f"), {"frontend": "f", "workers": 3})
    assert w.beats.bad == 2
    assert not w.beats.lives


# --- reported as stalled, with a spare ready --------------------------------------------------------------------------


class StalledFleet(ObservedFleet):
    """A fleet in which some workers are reported as stalled, with a healthy spare."""

    def __init__(self, *names: str, spares: int = 1) -> None:
        super().__init__(*names)
        self.spares = [f"s{n}" for n in range(spares)]
        for name in self.spares:
            self.world.join(name, spare=True)
        self.answering = {*names, *self.spares}
        self.beating = {*self.answering}
        self.asked: list[str] = []
        self.check = HangCheck(
            self.world,
            self.liveness,
            self.beats,
            self.bus,
            self.world.clock,
            LivenessSettings(),
            lambda: self.world.leads,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["StalledFleet"]:
        await self.start()
        await self.bus.subscribe("live.batch.*", self._answer)
        async with self.world.running():
            checking = asyncio.create_task(self.check.run())
            await self.pass_time(60)
            assert all(worker.fully_healthy for worker in self.world.fleet.workers.values())
            yield self
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)

    async def _answer(self, subject: str, body: Any) -> dict[str, Any] | None:
        name = subject.rpartition(".")[2]
        self.asked.append(name)
        return {"batch": body["share"]} if name in self.answering else None

    def hang(self, *names: str) -> None:
        """Stop workers' messages, and let a frontend report them as stalled."""
        self.beating -= {*names}
        self.answering -= {*names}
        for name in names:
            self.stalled(name)

    def wish(self, fact: type[DrainRequested] | type[ResumeRequested], name: str, **more: Any) -> None:
        """Record an operator's request."""
        instance = self.world.fleet.workers[name].joined.instance
        self.world.journal.observe(fact(worker=name, instance=instance, **more))
        self.world.turn()

    async def returns(self, name: str, most_s: float) -> float:
        """Drain and resume a worker. Return after how long it is healthy again, or `most_s`."""
        self.wish(DrainRequested, name, deadline_s=300)
        await self.pass_time(2)
        self.wish(ResumeRequested, name)
        began = self.world.clock.monotonic()
        while (
            not self.world.fleet.workers[name].fully_healthy and self.world.clock.monotonic() < began + most_s
        ):
            await self.pass_time(0.25)
        return self.world.clock.monotonic() - began

    def stalled(self, name: str) -> None:
        self.said(name)
        self.world.turn()

    def said(self, name: str) -> None:
        """Let a frontend report a worker as stalled, without reading the report yet."""
        worker = self.world.fleet.workers[name]
        self.world.journal.observe(
            RequestFailed(
                worker=name, instance=worker.joined.instance, frontend="f", failures_in_a_row=1, reason="stalled",
                routed_under=self.world.fleet.number,
            )
        )  # fmt: skip


async def test_a_hung_worker_is_detected_at_once_if_a_spare_is_ready() -> None:
    async with StalledFleet("w1", "w2", "w3").running() as w:
        w.hang("w2")
        await w.pass_time(0.75)
        (silent,) = w.world.facts(WorkerSilent)
        (activated,) = w.world.facts(SpareActivated)
        assert (silent.worker, activated.worker, activated.replaces) == ("w2", "s0", "w2")
        await w.pass_time(3)
        assert not w.world.facts(WorkerHeard), "an earlier beat does not acquit it"
        w.beating.add("w2")
        await w.pass_time(2)
        assert [fact.worker for fact in w.world.facts(WorkerHeard)] == ["w2"]
        assert len(w.world.facts(WorkerSilent)) == 1


async def test_a_worker_that_answers_keeps_its_place() -> None:
    async with StalledFleet("w1", "w2", "w3").running() as w:
        w.stalled("w2")
        await w.pass_time(2)
        assert w.asked == ["w2"] and not w.world.facts(WorkerSilent)
        w.stalled("w2")
        await w.pass_time(2)
        assert w.asked == ["w2", "w2"], "it is asked again for a new report"


@pytest.mark.slow
async def test_a_spare_that_becomes_ready_during_the_check_is_used() -> None:
    async with StalledFleet("w1", "w2", "w3").running() as w:
        back_s = await w.returns("s0", inf)
        assert 2 < back_s < inf
    async with StalledFleet(
        "w1", "w2", "w3"
    ).running() as w:  # the same world again: canaries come at the same times
        assert await w.returns("s0", back_s - 1) == back_s - 1
        w.hang("w2")
        await w.pass_time(0.75)
        assert not w.world.facts(WorkerSilent) and len(w.asked) > 1
        await w.pass_time(1)
        assert [fact.worker for fact in w.world.facts(WorkerSilent)] == ["w2"]


async def test_a_worker_that_is_heard_again_no_longer_counts_as_unanswered() -> None:
    async with StalledFleet("w1", spares=2).running() as w:
        w.hang("w1")
        await w.pass_time(0.75)
        assert [fact.worker for fact in w.world.facts(WorkerSilent)] == ["w1"]
        w.answering.add("w1")
        w.beating.add("w1")
        await w.beat("w1")
        w.hang("s0")
        await w.pass_time(0.75)
        assert [fact.worker for fact in w.world.facts(WorkerSilent)] == ["w1", "s0"]


async def test_old_reports_cause_no_check() -> None:
    async with StalledFleet("w1", "w2", "w3").running() as w:
        w.said("w2")
        await w.world.clock.advance(NEWS.total_seconds())
        w.world.turn()
        await w.pass_time(0.5)
        assert not w.asked
        w.said("w2")
        await w.world.clock.advance(NEWS.total_seconds() / 2)
        w.world.turn()
        await w.pass_time(0.5)
        assert w.asked == ["w2"]


async def test_without_a_spare_no_worker_is_checked() -> None:
    async with StalledFleet("w1", "w2", "w3", spares=0).running() as w:
        w.hang("w2")
        await w.pass_time(1)
        assert not w.asked and not w.world.facts(WorkerSilent)


async def test_a_worker_that_is_heard_meanwhile_is_not_accused() -> None:
    async with StalledFleet("w1", "w2", "w3").running() as w:
        w.hang("w2")
        await w.world.clock.advance(0.1)
        await w.beat("w2")
        await w.pass_time(1)
        assert not w.world.facts(WorkerSilent), "it has sent a beat"
        w.hang("w3")
        await w.world.clock.advance(0.1)
        workers = {"w3": w.world.fleet.workers["w3"].joined.instance}
        await w.bus.publish(subjects.links("g"), {"frontend": "g", "at": "now", "workers": workers})
        await w.pass_time(0.75)
        assert not w.world.facts(WorkerSilent), "another frontend is connected to it"


async def test_many_unanswered_workers_at_once_are_not_accused() -> None:
    async with StalledFleet("w1", "w2", "w3").running() as w:
        w.hang("w1", "w2", "w3")
        await w.pass_time(1)
        assert not w.world.facts(WorkerSilent)


async def test_a_standby_or_a_cut_off_controller_checks_and_accuses_no_worker() -> None:
    async with StalledFleet("w1", "w2", "w3").running() as w:
        w.world.leads = False
        w.hang("w2")
        await w.pass_time(0.5)
        assert not w.asked
        w.world.leads = True
        w.bus.reachable = False
        w.stalled("w2")
        await w.pass_time(0.5)
        w.bus.reachable = True
        w.stalled("w2")
        await w.world.clock.advance(0.1)
        await w.world.clock.advance(0.1)
        w.bus.connected_since = w.world.clock.monotonic()  # an answer may have been lost
        await w.pass_time(0.5)
        w.stalled("w2")
        w.bus.unread = 1
        await w.pass_time(0.5)
        assert not w.world.facts(WorkerSilent)
        w.bus.unread = 0
        w.stalled("w2")
        await w.pass_time(0.5)
        assert w.world.facts(WorkerSilent)
