"""The actuator commands workers until they agree with the fold."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from canary_world import World
from memory_bus import MemoryBus

from controller.deciders.capacity import Slo
from controller.deciders.degradation import DegradationPolicy
from controller.runtime.actuator import Actuator
from controller.runtime.beats import Beats
from controller.runtime.settings import ActuatorSettings
from events import subjects
from events.intrusion.control_message import foreign
from events.observations import (
    CanaryPassed,
    DeviceFaulted,
    DeviceRecovered,
    DrainRequested,
    ResumeRequested,
    Topology,
    WorkerLeft,
    WorkerSilent,
)


class BusWorker:
    """One worker on the bus, which obeys its commands."""

    def __init__(self) -> None:
        self.world = World()
        self.bus = MemoryBus(connected_since=0.0)
        self.beats = Beats(self.world.clock)
        self.actuator = Actuator(
            self.world, self.beats, self.bus, self.world.clock, ActuatorSettings(), lambda: self.world.leads
        )
        self.draining = False
        self.convicted = False
        self.batch: float | None = 1.0
        self.deaf = False
        self.heard: list[tuple[str, Mapping[str, Any]]] = []

    def note(self, subject: str, body: Mapping[str, Any]) -> None:
        """Store a control message, without its common fields."""
        verb = subject.split(".")[1]
        assert foreign(verb, subject.split(".")[2], body) == ""
        self.heard.append((verb, {name: value for name, value in body.items() if name != "control"}))

    async def on_drain(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        self.note(subject, body)
        if self.deaf:
            return {"error": "not now"}
        self.draining = True
        return {"draining": True}

    async def on_resume(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.note(subject, body)
        self.draining = False
        return {"draining": False}

    async def on_retire(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.note(subject, body)
        return {"retired": True}

    async def on_distrust(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.note(subject, body)
        self.convicted = bool(body["reason"])
        return {"convicted": self.convicted}

    async def on_batch(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.note(subject, body)
        self.batch = float(body["share"])
        return {"batch": self.batch}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["BusWorker"]:
        await self.beats.start(self.bus)
        await self.bus.subscribe(subjects.command("drain", "w1"), self.on_drain)
        await self.bus.subscribe(subjects.command("resume", "w1"), self.on_resume)
        await self.bus.subscribe(subjects.command("retire", "w1"), self.on_retire)
        await self.bus.subscribe(subjects.command("distrust", "w1"), self.on_distrust)
        await self.bus.subscribe(subjects.command("batch", "w1"), self.on_batch)
        self.world.join("w1")
        task = asyncio.create_task(self.actuator.run())
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            body = {"worker": "w1", "instance": "w1-1", "draining": self.draining, "load": {}}
            body["convicted"] = self.convicted
            if self.batch is not None:
                body["batch"] = self.batch
            await self.bus.publish(subjects.beat("w1"), {**body, "at": self.world.clock.now().isoformat()})
            await self.world.pass_time(1.0)

    def wish(self, fact: type[DrainRequested] | type[ResumeRequested], **more: Any) -> None:
        self.world.journal.observe(fact(worker="w1", instance="w1-1", **more))
        self.world.turn()


async def test_a_draining_worker_gets_one_drain_command_with_its_deadline() -> None:
    async with BusWorker().running() as told:
        await told.pass_time(2)
        assert not told.heard
        told.wish(DrainRequested, deadline_s=30)
        await told.pass_time(5)
    ((what, body),) = told.heard
    assert what == "drain"
    assert body["instance"] == "w1-1"
    assert 25 <= body["deadline_s"] <= 30


async def test_a_command_to_a_refusing_worker_is_repeated_with_backoff() -> None:
    async with BusWorker().running() as told:
        await told.pass_time(1)
        told.deaf = True
        told.wish(DrainRequested, deadline_s=300)
        await told.pass_time(30)
        few = len(told.heard)
        assert 4 <= few <= 12
        told.deaf = False
        await told.pass_time(12)
        assert told.draining
        said = len(told.heard)
        await told.pass_time(20)
        assert len(told.heard) == said


async def test_a_worker_that_does_not_answer_does_not_stop_the_loop() -> None:
    async with BusWorker().running() as told:
        told.world.join("w2")
        told.world.journal.observe(DrainRequested(worker="w2", instance="w2-1", deadline_s=100))
        told.wish(DrainRequested, deadline_s=100)
        await told.pass_time(3)
    assert told.draining


async def test_a_resumed_worker_gets_a_resume_command() -> None:
    async with BusWorker().running() as told:
        told.wish(DrainRequested, deadline_s=300)
        await told.pass_time(3)
        before = told.draining
        told.wish(ResumeRequested)
        await told.pass_time(3)
        assert (before, told.draining) == (True, False)
    assert [what for what, _ in told.heard] == ["drain", "resume"]


async def test_only_the_holder_of_the_lease_sends_commands() -> None:
    async with BusWorker().running() as told:
        told.world.leads = False
        told.wish(DrainRequested, deadline_s=300)
        await told.pass_time(5)
        assert not told.heard
        told.world.leads = True
        await told.pass_time(2)
    assert told.draining


async def test_dead_workers_get_no_commands() -> None:
    async with BusWorker().running() as told:
        told.wish(DrainRequested, deadline_s=300)
        told.world.journal.observe(WorkerLeft(worker="w1", instance="w1-1", mode="immediate", exit=-9))
        told.world.turn()
        told.draining = False
        await told.pass_time(5)
    assert len(told.heard) <= 1


async def test_a_worker_that_was_declared_dead_and_lives_is_told_to_end() -> None:
    async with BusWorker().running() as told:
        await told.pass_time(1)
        told.world.journal.observe(WorkerSilent(worker="w1", instance="w1-1", silent_s=3.0, observer="c"))
        told.world.turn()
        await told.world.until(lambda: not told.world.fleet.workers["w1"].alive, 200)
        assert "retire" not in {what for what, _ in told.heard}, "nothing is heard of the worker"
        await told.pass_time(3)
    assert told.heard[-1] == ("retire", {"instance": "w1-1"})


async def test_a_dead_instance_that_hangs_in_a_process_with_live_workers_is_told_to_end() -> None:
    async with BusWorker().running() as told:
        process: dict[str, Any] = {"pid": 17, "topology": Topology(host="here")}
        for worker, more in (("w2", process), ("w3", process), ("w4", {**process, "pid": 18})):
            told.world.join(worker, **more)
        await told.bus.subscribe(subjects.command("retire", "w2"), told.on_retire)
        await told.bus.subscribe(subjects.command("retire", "w4"), told.on_retire)
        for worker in ("w2", "w4"):
            told.world.journal.observe(
                WorkerSilent(worker=worker, instance=f"{worker}-1", silent_s=3.0, observer="c")
            )
        told.world.turn()
        await told.world.until(lambda: not told.world.fleet.workers["w2"].alive, 200)
        await told.pass_time(3)
        assert not told.heard, "nothing is heard of the whole process"
        body = {"worker": "w3", "instance": "w3-1", "draining": False, "load": {}}
        await told.bus.publish(subjects.beat("w3"), {**body, "at": told.world.clock.now().isoformat()})
        await told.world.pass_time(1.0)
    assert told.heard == [("retire", {"instance": "w2-1"})]


@pytest.mark.slow
async def test_a_worker_that_was_cut_off_until_it_was_forgotten_is_told_to_end() -> None:
    """The worker believes that it serves, and the fleet does not show it any more: no other component would tell it."""
    async with BusWorker().running() as told:
        told.world.journal.observe(WorkerSilent(worker="w1", instance="w1-1", silent_s=3.0, observer="c"))
        told.world.turn()
        await told.world.until(lambda: "w1" not in told.world.fleet.workers, 1000)
        assert "retire" not in {what for what, _ in told.heard}
        await told.pass_time(3)
    assert told.heard[-1] == ("retire", {"instance": "w1-1"})


async def test_a_former_instance_is_told_to_end_after_another_took_its_name_and_left() -> None:
    async with BusWorker().running() as told:
        await told.pass_time(1)
        joined = told.world.fleet.workers["w1"].joined
        told.world.journal.observe(replace(joined, instance="stranger"))
        told.world.turn()
        await told.pass_time(3)
        assert not told.heard, "two instances would take the name from each other"
        told.world.journal.observe(WorkerLeft(worker="w1", instance="stranger", mode="graceful", exit=0))
        told.world.turn()
        await told.pass_time(3)
    assert told.heard[-1] == ("retire", {"instance": "w1-1"})


async def test_a_convicted_worker_is_told_so_and_told_when_it_is_acquitted() -> None:
    """A convicted worker must not send its KV caches to others."""
    about = {
        "worker": "w1",
        "instance": "w1-1",
        "device": "GPU-1",
        "fault_class": "ecc_uncorrectable",
        "code": "48",
    }
    async with BusWorker().running() as told:
        await told.pass_time(2)
        assert not told.heard
        told.world.journal.observe(DeviceFaulted(**about, fatal=True, weight=0.0))
        told.world.turn()
        await told.pass_time(4)
        before = told.convicted
        told.world.journal.observe(DeviceRecovered(**about))
        told.world.turn()
        await told.pass_time(4)
        assert (before, told.convicted) == (True, False)
    (first, second) = [body for what, body in told.heard if what == "distrust"]
    assert "GPU-1" in first["reason"] and second["reason"] == ""


async def test_a_worker_is_told_its_share_of_the_batch_at_each_change_of_its_models_level() -> None:
    async with BusWorker().running() as told:
        world = told.world
        await told.pass_time(2)
        at, key = world.clock.now(), world.fleet.workers["w1"].joined.canary_key
        probed: dict[str, Any] = {"worker": "w1", "instance": "w1-1", "canary_key": key, "canary": "c"}
        measured: dict[str, Any] = {
            "check_type": "scheduled",
            "latency_ms": 1.0,
            "attempts": 1,
            "distance": 0.0,
        }
        world.journal.observe(CanaryPassed(**probed, **measured, sent_under=world.number, sent_at=at))
        await told.pass_time(2)
        assert world.status("w1") == "HEALTHY" and not told.heard
        for throughput, share in ((100.0, 0.5), (None, 1.0)):
            slos = {"m": Slo(slo_throughput_rps=throughput)}
            world.policy = replace(world.policy, degradation=DegradationPolicy(slos=slos))
            await told.pass_time(10)
            assert told.batch == share
        told.batch = None  # of a version without batch shares
        world.policy = replace(
            world.policy, degradation=DegradationPolicy(slos={"m": Slo(slo_throughput_rps=100)})
        )
        await told.pass_time(10)
        assert world.fleet.models["m"].knobs.batch_size == 0.5
    assert told.heard == [
        ("batch", {"instance": "w1-1", "share": 0.5}),
        ("batch", {"instance": "w1-1", "share": 1.0}),
    ]
