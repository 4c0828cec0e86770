"""A worker reports its GPUs and their faults to the fleet."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import shim
from engine_contract import prompt
from memory_journal import MemoryJournal, MemoryStream
from plain_frontend import PlainFrontend
from watch_kit import QUICK
from worker_process import START_S, Spawn, left

from controller.adapters.embedded.server import EmbeddedServer
from events.errors import BadSetting
from events.fact import Fact
from events.journal.nats import NatsJournal
from events.observations import (
    DeviceFaulted,
    DeviceRecovered,
    DrainFinished,
    EngineFaulted,
    ShutdownBegan,
    WorkerJoined,
    WorkerLeft,
)
from events.process.presence import present
from workers.config.settings import WorkerConfig
from workers.config.settings_check import load_settings
from workers.devices.mapping import UnknownGpus
from workers.devices.nvml import Nvml
from workers.devices.watch import DeviceWatch
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.exits import FAILED
from workers.worker import InferenceWorker

ABOUT: dict[str, Any] = {"worker": "w0", "instance": "i1", "device": "GPU-0001"}
Eventually = Callable[..., Awaitable[None]]


Begin = Callable[..., "Life"]


@dataclass
class Life:
    """A worker with GPU 1, and its facts."""

    worker: InferenceWorker
    stream: MemoryStream
    stop: asyncio.Event
    running: asyncio.Task[int]

    @property
    def facts(self) -> list[Fact]:
        return [event.fact for event in self.stream.events]


def made(stream: MemoryStream, devices: DeviceWatch, **config: Any) -> InferenceWorker:
    engine = SimulatedEngine(EngineShape(), ConstantTiming(itl_s=0.002))
    journal = MemoryJournal(stream, "worker:w0")
    return InferenceWorker(WorkerConfig(name="w0", instance="i1", **config), engine, journal, None, devices)


@pytest.fixture
async def begin(gpus: shim.State) -> AsyncIterator[Begin]:
    lives: list[Life] = []

    def start(watch: type[DeviceWatch] = DeviceWatch, driver: type[Nvml] = Nvml, **config: Any) -> Life:
        stream, stop = MemoryStream(), asyncio.Event()
        worker = made(stream, watch(("1",), QUICK, driver=driver), **config)
        lives.append(Life(worker, stream, stop, asyncio.ensure_future(worker.run(stop))))
        return lives[-1]

    yield start
    for life in lives:
        life.stop.set()
        async with asyncio.timeout(20):
            assert await life.running in (0, 1)
    gpus.gpu[1].raise_xid(79)  # no watch is left to receive it


async def failure_reason(life: Life) -> str:
    """Wait until the worker has failed; return the reason that it recorded."""
    async with asyncio.timeout(20):
        assert await life.running == 1
    began = life.facts[-3]
    assert isinstance(began, ShutdownBegan) and began.mode == "self_initiated"
    assert life.facts[-1] == WorkerLeft(worker="w0", instance="i1", mode="self_initiated", exit=1)
    assert not [fact for fact in life.facts if isinstance(fact, EngineFaulted)], "the engine is not to blame"
    return began.reason


async def test_a_worker_registers_its_gpus_and_then_reports_their_faults(
    gpus: shim.State, begin: Begin, eventually: Eventually
) -> None:
    gpus.gpu[1].remap_pending = 1  # before the watch begins
    life = begin()
    await eventually(lambda: len(life.facts) == 2)
    joined, pending = life.facts
    assert isinstance(joined, WorkerJoined) and joined.topology.gpus == ("GPU-0001",)
    assert pending == DeviceFaulted(**ABOUT, fault_class="row_remap_pending", fatal=False)
    gpus.gpu[1].raise_xid(74)
    await eventually(lambda: len(life.facts) == 3)
    assert life.facts[2] == DeviceFaulted(**ABOUT, fault_class="xid_nvlink", code="74", fatal=False)
    gpus.gpu[1].remap_pending = 0
    await eventually(lambda: len(life.facts) == 4)
    assert life.facts[3] == DeviceRecovered(**ABOUT, fault_class="row_remap_pending")
    life.stop.set()
    assert await life.running == 0


async def test_a_worker_ends_with_a_gpu_that_fails_under_its_engine(
    gpus: shim.State, begin: Begin, eventually: Eventually
) -> None:
    life = begin()
    await eventually(lambda: life.worker.serving.is_set())
    frontend = await PlainFrontend.connect(life.worker.server.address[1])
    stream = frontend.ask(prompt(), max_tokens=20_000)
    await frontend.until(lambda: frontend.tokens(stream))
    gpus.gpu[1].raise_xid(79)
    assert await failure_reason(life) == "GPU GPU-0001: Xid 79, the GPU has fallen off the bus"
    assert life.facts[1] == DeviceFaulted(**ABOUT, fault_class="xid", code="79")
    assert life.facts[-2] == DrainFinished(worker="w0", instance="i1", completed=0, migrated=1)
    end = frontend.end(stream)
    assert end is not None and (end.error or "").startswith("engine_shutdown: GPU GPU-0001")
    frontend.transport.abort()


async def test_an_xid_from_before_the_worker_serves_is_not_forgotten(gpus: shim.State, begin: Begin) -> None:
    class Late(DeviceWatch):
        def begin(self, *callbacks: Any) -> None:
            gpus.gpu[1].raise_xid(48)  # its Xids are subscribed to, but not reported yet
            super().begin(*callbacks)

    life = begin(watch=Late)
    assert "Xid 48" in await failure_reason(life)


async def test_an_earlier_fault_does_not_end_a_worker_that_starts_with_it(
    gpus: shim.State, begin: Begin, eventually: Eventually
) -> None:
    gpus.gpu[1].set(remap_failed=1, recovery=1)
    life = begin()
    await eventually(lambda: len(life.facts) == 3)
    found = {(f.fault_class, f.fatal) for f in life.facts[1:] if isinstance(f, DeviceFaulted)}
    assert found == {("row_remap_failure", True), ("recovery", True)}
    trust = life.worker.server.moves.trust
    assert trust.doubts == {"device"}, "it ships no KV cache"
    gpus.gpu[1].recovery = 0
    await eventually(lambda: len(life.facts) == 4)  # it waits for the repair, and reports it
    assert trust.doubts == {"device"}
    gpus.gpu[1].remap_failed = 0
    await eventually(lambda: len(life.facts) == 5)
    assert not trust.doubts
    life.stop.set()
    assert await life.running == 0


async def test_a_worker_in_front_of_a_server_survives_a_fault_of_the_servers_gpu(
    gpus: shim.State, begin: Begin, eventually: Eventually
) -> None:
    life = begin(computes_on_gpus=False)
    await eventually(lambda: life.worker.serving.is_set())
    gpus.gpu[1].raise_xid(79)
    await eventually(lambda: len(life.facts) == 2)
    assert life.facts[1] == DeviceFaulted(**ABOUT, fault_class="xid", code="79")
    life.stop.set()
    assert await life.running == 0


@pytest.mark.parametrize("part", ["read", "wait"])
async def test_a_watch_that_fails_ends_the_worker(
    gpus: shim.State, begin: Begin, eventually: Eventually, part: str
) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    reason = await failure_reason(begin(driver=type("Failing", (Nvml,), {part: fail})))
    assert reason == "the device watch failed: ZeroDivisionError('a bug')"
    await eventually(lambda: not any(thread.name.startswith("device-") for thread in threading.enumerate()))


async def test_a_process_ends_with_its_gpu_and_leaves_nothing_behind(
    gpus: shim.State, library: Path, spawn: Spawn, eventually: Eventually
) -> None:
    driver = {"LD_LIBRARY_PATH": str(library.parent)}
    process = await spawn("--itl-ms", "10", "--gpus", "1", **driver)
    await eventually(lambda: process.ready and present(process.data), START_S)
    frontend = await PlainFrontend.connect(process.port())
    stream = frontend.ask(prompt(), max_tokens=20_000)
    await frontend.until(lambda: frontend.tokens(stream))
    gpus.gpu[1].raise_xid(119)
    assert await process.ended() == 1
    (falls,) = (line for line in process.lines if '"worker_falls"' in line)
    assert '"level": "critical"' in falls and "GPU GPU-0001: Xid 119" in falls
    assert not left(process, str(process.ready[0]["instance"]))
    frontend.transport.abort()


@pytest.mark.slow
@pytest.mark.servers
async def test_a_hanging_broker_does_not_delay_a_failing_worker_and_no_fact_is_lost(
    gpus: shim.State, library: Path, spawn: Spawn, own_nats: EmbeddedServer, eventually: Eventually
) -> None:
    driver = {"LD_LIBRARY_PATH": str(library.parent), "nats_url": own_nats.url}
    process = await spawn("--gpus", "1", HOLDFAST_WORKER_INSTANCE="i1", **driver)
    await eventually(lambda: process.ready, START_S)
    os.kill(own_nats.pid, signal.SIGSTOP)
    try:
        gpus.gpu[1].raise_xid(95)
        assert await process.ended() == 1
    finally:
        os.kill(own_nats.pid, signal.SIGCONT)
    successor = await spawn(HOLDFAST_WORKER_INSTANCE="i2", nats_url=own_nats.url)
    await eventually(lambda: successor.ready, START_S)
    journal = await NatsJournal.connect(own_nats.url, "test:reader:1")
    kinds: set[str] = set()
    async with asyncio.timeout(20), contextlib.aclosing(journal.read(0)) as batches:
        async for batch in batches:
            kinds |= {event.fact.kind() for event in batch if getattr(event.fact, "instance", "") == "i1"}
            if {
                "worker_joined",
                "device_faulted",
                "shutdown_began",
                "drain_finished",
                "worker_left",
            } <= kinds:
                break
    await journal.close()


async def test_a_worker_with_a_missing_gpu_does_not_start(gpus: shim.State) -> None:
    with pytest.raises(UnknownGpus, match="not on this host"):
        await made(MemoryStream(), DeviceWatch(("5",), QUICK)).run(asyncio.Event())


@pytest.mark.slow
@pytest.mark.servers
@pytest.mark.parametrize("flags", [(), ("--watch-only",)])
async def test_a_missing_gpu_is_not_a_usage_error(
    flags: tuple[str, ...], gpus: shim.State, library: Path, spawn: Spawn, nats_url: str
) -> None:
    process = await spawn("--gpus", "5", *flags, nats_url=nats_url, LD_LIBRARY_PATH=str(library.parent))
    assert await process.ended() == FAILED, (
        "the GPU may return, so a restart may succeed; a usage error is permanent"
    )
    assert "gpus = 5: not on this host, which has 0 (GPU-0000), 1 (GPU-0001)" in process.lines[-1]


@pytest.mark.parametrize(
    ("flags", "message"), [({"gpus": "first"}, "neither"), ({"gpus": "0", "count": 2}, "2 workers")]
)
def test_invalid_gpu_settings_are_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        load_settings(flags, {})


def test_a_simulated_worker_imports_no_device_modules() -> None:
    code = (
        "import sys\n"
        "from workers.runtime import _devices\n"
        "from workers.config.settings import WorkerSettings\n"
        "assert _devices(WorkerSettings(), 'w0') is None\n"
        "print([name for name in sys.modules if name.startswith(('pynvml', 'workers.devices', 'psutil'))])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "[]\n"
