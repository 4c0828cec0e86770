"""A group of ranks is one worker: a fault of one rank fails the group and is reported per rank."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_contract import prompt
from memory_journal import MemoryJournal, MemoryStream
from plain_frontend import PlainFrontend

from events.fact import Fact
from events.observations import DeviceFaulted, DeviceRecovered, EngineFaulted, ShutdownBegan, WorkerJoined
from workers.config.settings import WorkerConfig
from workers.control.commands import BadRequest
from workers.devices.simulated import SimulatedDevices
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.worker import InferenceWorker

TP = 8
STEP_S = 0.002


class Group:
    """A worker of eight ranks, and the facts that it has recorded."""

    def __init__(self, **config: Any) -> None:
        self.stream, self.stop = MemoryStream(), asyncio.Event()
        engine = SimulatedEngine(EngineShape(tp=TP), ConstantTiming(itl_s=STEP_S))
        at = WorkerConfig(name="w0", instance="i1", **config)
        journal = MemoryJournal(self.stream, "worker:w0")
        self.worker = InferenceWorker(at, engine, journal, None, SimulatedDevices("w0", TP))
        self.running = asyncio.ensure_future(self.worker.run(self.stop))

    def facts(self, *kinds: type[Fact]) -> list[Any]:
        return [event.fact for event in self.stream.events if isinstance(event.fact, kinds)]

    def chaos(self, fault: str, **body: Any) -> None:
        self.worker.faults.play({"fault": fault, **body})

    async def frontend(self) -> PlainFrontend:
        async with asyncio.timeout(20):
            await self.worker.serving.wait()
        return await PlainFrontend.connect(self.worker.server.address[1])


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    made = Group(nvlink_domain="rack 1", rail="r0")
    yield made
    made.stop.set()
    async with asyncio.timeout(20):
        await made.running


async def test_a_group_registers_its_ranks_and_their_devices(group: Group) -> None:
    (await group.frontend()).transport.abort()
    (joined,) = group.facts(WorkerJoined)
    assert joined.tp == TP
    assert joined.topology.gpus == tuple(f"SIM-w0-{rank}" for rank in range(TP))
    assert (joined.topology.nvlink_domain, joined.topology.rail) == ("rack 1", "r0")


async def test_a_fatal_fault_of_one_ranks_device_fails_the_group(group: Group) -> None:
    frontend = await group.frontend()
    stream = frontend.ask(prompt(), max_tokens=10_000)
    await frontend.until(lambda: frontend.tokens(stream))
    group.chaos("xid", rank=3)
    async with asyncio.timeout(20):
        assert await group.running == 1
    (fault,) = group.facts(DeviceFaulted)
    assert (fault.device, fault.fault_class, fault.code, fault.fatal) == ("SIM-w0-3", "xid", "48", True)
    (began,) = group.facts(ShutdownBegan)
    assert began.reason == "GPU SIM-w0-3: Xid 48, double-bit ECC error, not correctable"
    end = frontend.end(stream)
    assert end is not None and (end.error or "").startswith("engine_shutdown: GPU SIM-w0-3")
    frontend.transport.abort()


async def test_an_nvlink_fault_of_one_rank_leaves_the_group_alive_and_is_healed(group: Group) -> None:
    frontend = await group.frontend()
    group.chaos("nvlink", rank=5)
    group.chaos("nvlink", rank=5)  # it is active already
    await frontend.until(lambda: group.facts(DeviceFaulted))
    (fault,) = group.facts(DeviceFaulted)
    assert (fault.device, fault.fault_class, fault.fatal, fault.weight) == (
        "SIM-w0-5",
        "xid_nvlink",
        False,
        0.0,
    )
    assert len(await frontend.answer(frontend.ask(prompt()))) == 16
    group.chaos("heal")
    await frontend.until(lambda: group.facts(DeviceRecovered))
    assert group.facts(DeviceRecovered)[0].device == "SIM-w0-5"
    frontend.transport.abort()


async def test_a_fault_of_one_ranks_device_with_a_duration_leaves_those_of_others(group: Group) -> None:
    frontend = await group.frontend()
    group.chaos("nvlink", rank=5, duration=0.05)
    group.chaos("nvlink", rank=6)
    group.chaos("slow", rank=2, argument=3.0, duration=0.05)
    group.chaos("slow", rank=3, argument=2.0)
    engine = group.worker.engine
    assert isinstance(engine, SimulatedEngine)
    slowness = engine.each[0].scheduler.faults.slowness
    await frontend.until(lambda: group.facts(DeviceRecovered) and slowness == {3: 2.0})
    assert [fact.device for fact in group.facts(DeviceRecovered)] == ["SIM-w0-5"]
    group.chaos("heal")
    await frontend.until(lambda: len(group.facts(DeviceRecovered)) == 2)
    assert group.facts(DeviceRecovered)[1].device == "SIM-w0-6" and not slowness
    frontend.transport.abort()


async def test_an_error_of_one_rank_fails_every_request_of_the_group(group: Group) -> None:
    frontend = await group.frontend()
    streams = [frontend.ask(prompt(salt=n), max_tokens=10_000) for n in range(3)]
    await frontend.until(lambda: all(frontend.tokens(stream) for stream in streams))
    group.chaos("error", rank=6)
    for stream in streams:
        await frontend.answer(stream)
    errors = {(end.error if (end := frontend.end(stream)) else None) for stream in streams}
    assert errors == {"engine_error: a rehearsed exception in the forward pass of rank 6"}
    assert "rank 6" in group.facts(EngineFaulted)[0].reason
    frontend.transport.abort()


async def test_all_ranks_wait_for_the_slowest() -> None:
    engine = SimulatedEngine(EngineShape(tp=TP), ConstantTiming(itl_s=STEP_S))
    faults = engine.each[0].scheduler.faults
    assert engine.chaos("slow", 10, 2) and engine.chaos("slow", 3, 5)
    assert faults.slow == 10
    assert engine.chaos("slow", 2, 2)
    assert faults.slow == 3
    assert engine.chaos("heal", 0)
    assert faults.slow == 1


@pytest.mark.parametrize("rank", [TP, -1, "three"])
async def test_a_fault_of_a_missing_rank_is_refused(group: Group, rank: Any) -> None:
    with pytest.raises(BadRequest, match=r"rank = "):
        group.chaos("error", rank=rank)
