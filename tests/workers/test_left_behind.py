"""What a killed worker leaves behind: nothing, once the next one has started."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil
import pytest
from engine_contract import prompt
from plain_frontend import PlainFrontend
from worker_process import ROOT, START_S, Process, Spawn, held, left

from events import subjects
from events.codec import new_id
from events.nats.bus import NatsBus
from events.process.presence import present
from workers import keeper
from workers.kv_transfer.receiver import ROOT as SHARED

Eventually = Callable[..., Awaitable[None]]

OWNER = """
import sys
from workers.kv_transfer.receiver import Regions
regions = Regions(sys.argv[1])
regions.take(1 << 20)
print("here", flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(
    not SHARED.is_dir(), reason="needs shared memory as files in /dev/shm: run it on Linux"
)


@asynccontextmanager
async def owner(instance: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process that holds a region of shared memory."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, instance, cwd=ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"here\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_the_next_start_sweeps_the_regions_of_killed_workers_only(
    spawn: Spawn, eventually: Eventually
) -> None:
    dead, living = new_id(), new_id()
    async with owner(living):
        async with owner(dead) as process:
            assert held(dead) == ["0"]
            process.kill()
        worker = await spawn()
        await eventually(lambda: worker.ready, START_S)
        assert not held(dead) and held(living) == ["0"]


async def serving(
    spawn: Spawn, eventually: Eventually, *flags: str, **more: str
) -> tuple[Process, PlainFrontend, str]:
    """Start a worker; return it, a frontend with a stream on it, and its instance."""
    process = await spawn("--itl-ms", "10", *flags, **more)
    await eventually(lambda: process.ready and present(process.data), START_S)
    frontend = await PlainFrontend.connect(process.port())
    stream = frontend.ask(prompt(), max_tokens=200)
    await frontend.until(lambda: frontend.tokens(stream))
    return process, frontend, str(process.ready[0]["instance"])


@pytest.mark.slow
@pytest.mark.servers
async def test_a_worker_with_a_dead_engine_leaves_nothing_behind(
    spawn: Spawn, nats_url: str, eventually: Eventually
) -> None:
    process, frontend, instance = await serving(spawn, eventually, "--name", "w40", nats_url=nats_url)
    bus = await NatsBus.connect(nats_url, "test")
    assert "error" not in await bus.request(subjects.command("chaos", "w40"), {"fault": "die"})
    await bus.close()
    assert await process.ended() == 1
    (falls,) = (line for line in process.lines if '"worker_falls"' in line)
    assert '"level": "critical"' in falls and "EngineDead" in falls
    assert not left(process, instance)
    frontend.transport.abort()


@pytest.mark.slow
@pytest.mark.servers
async def test_the_successor_of_a_killed_worker_takes_over_or_sweeps_what_it_left(
    spawn: Spawn, nats_url: str, eventually: Eventually
) -> None:
    killed, frontend, instance = await serving(spawn, eventually, "--name", "w42", nats_url=nats_url)
    killed.inner.kill()
    assert await killed.ended() == -signal.SIGKILL
    frontend.transport.abort()
    successor, frontend, _ = await serving(spawn, eventually, "--name", "w42", nats_url=nats_url)
    assert not held(instance)
    successor.inner.send_signal(signal.SIGTERM)
    assert await successor.ended() == 0
    assert not left(successor, instance)
    frontend.transport.abort()


@pytest.mark.slow
async def test_a_worker_that_lost_its_keeper_logs_it_keeps_serving_and_leaves_gracefully(
    spawn: Spawn, eventually: Eventually
) -> None:
    process, frontend, instance = await serving(spawn, eventually)
    children = psutil.Process(process.inner.pid).children()
    kept = [child for child in children if child.name() == keeper.NAME.decode()]
    if not kept:
        pytest.skip("needs the keeper: run it on Linux, on x86-64 with glibc")
    kept[0].kill()
    await eventually(lambda: "keeper_ended" in process.events, START_S)
    assert not psutil.pid_exists(kept[0].pid)
    assert len(await frontend.answer(frontend.ask(prompt(salt=1)))) == 16
    process.inner.send_signal(signal.SIGTERM)
    assert await process.ended() == 0
    assert not left(process, instance)
    frontend.transport.abort()
