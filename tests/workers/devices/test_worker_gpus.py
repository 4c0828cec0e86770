"""A worker tells the fleet of its GPUs and of their faults."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import shim
from watch_kit import QUICK

from events.journal.memory import MemoryJournal, MemoryStream
from events.observations import DeviceFaulted, DeviceRecovered, WorkerJoined
from workers.devices.mapping import UnknownGpus
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import Shape
from workers.engines.simulated.timing import ConstantTiming
from workers.gpu import DeviceWatch
from workers.obedience import Place
from workers.settings import BadSetting, load_settings
from workers.worker import Worker

ABOUT = {"worker": "w0", "instance": "i1", "device": "GPU-0001"}
Eventually = Callable[..., Awaitable[None]]


def made(stream: MemoryStream, *gpus: str) -> Worker:
    engine = SimulatedEngine(Shape(), ConstantTiming(itl_s=0.002))
    journal = MemoryJournal(stream, "worker:w0")
    return Worker(Place(name="w0", instance="i1"), engine, journal, None, DeviceWatch(gpus, QUICK))


@pytest.fixture
async def stream(gpus: shim.State) -> AsyncIterator[MemoryStream]:
    """What a worker with GPU 1 says while it serves."""
    stream, stop = MemoryStream(), asyncio.Event()
    running = asyncio.ensure_future(made(stream, "1").run(stop))
    yield stream
    stop.set()
    async with asyncio.timeout(20):
        assert await running == 0
    gpus.gpu[1].raise_xid(79)  # nobody listens any more


async def test_it_registers_its_gpus_and_reports_their_faults_after_that(
    gpus: shim.State, stream: MemoryStream, eventually: Eventually
) -> None:
    gpus.gpu[1].remap_pending = 1  # before it begins to watch
    await eventually(lambda: len(stream.events) == 2)
    joined, pending = (event.fact for event in stream.events)
    assert isinstance(joined, WorkerJoined) and joined.topology.gpus == ("GPU-0001",)
    assert pending == DeviceFaulted(**ABOUT, fault_class="row_remap_pending", fatal=False)
    gpus.gpu[1].raise_xid(79)
    await eventually(lambda: len(stream.events) == 3)
    assert stream.events[2].fact == DeviceFaulted(**ABOUT, fault_class="xid", code="79")
    gpus.gpu[1].remap_pending = 0
    await eventually(lambda: len(stream.events) == 4)
    assert stream.events[3].fact == DeviceRecovered(**ABOUT, fault_class="row_remap_pending")


async def test_a_worker_of_a_gpu_that_is_not_there_does_not_start(gpus: shim.State) -> None:
    with pytest.raises(UnknownGpus, match="not on this host"):
        await made(MemoryStream(), "5").run(asyncio.Event())


@pytest.mark.parametrize(
    ("flags", "message"), [({"gpus": "first"}, "neither"), ({"gpus": "0", "count": 2}, "2 workers")]
)
def test_gpus_that_make_no_sense_are_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        load_settings(flags, {})


def test_a_simulated_worker_imports_nothing_of_it() -> None:
    code = (
        "import sys\n"
        "from workers.runtime import _device_watch\n"
        "from workers.settings import WorkerSettings\n"
        "assert _device_watch(WorkerSettings()) is None\n"
        "print([name for name in sys.modules if name.startswith(('pynvml', 'workers.devices', 'workers.gpu', 'psutil'))])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "[]\n"
