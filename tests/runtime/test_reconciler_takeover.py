"""Two controllers on a real broker: one decides; when it is killed, the other decides within seconds."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import pytest
from fleet_history import History
from roles import Process, process

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.server import EmbeddedServer
from events.decisions import HealthChanged, HealthStatus
from events.fact import Decision, Recorded
from events.journal.nats import NatsJournal

pytestmark = pytest.mark.servers
Eventually = Callable[..., Awaitable[None]]

CONTROLLER = """
import asyncio, sys
from controller.adapters.clock import SystemClock
from controller.deciders.fleet import FleetPolicy
from controller.runtime.lease import Lease
from controller.runtime.reconciler import Reconciler
from events.journal.nats import NatsJournal

async def main():
    clock = SystemClock()
    journal = await NatsJournal.connect(sys.argv[1], f"controller:{sys.argv[2]}")
    lease = Lease(journal.cell("leader"), journal.source, clock)
    lease.listen(lambda held: print("held" if held else "lost", flush=True))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(lease.run())
        tasks.create_task(Reconciler(journal, lease, FleetPolicy(), clock).run())

asyncio.run(main())
"""


def controller(url: str, name: str) -> AbstractAsyncContextManager[Process]:
    """Return a controller in its own process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = (sys.executable, "-c", CONTROLLER, url, name)
    return process(*command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


async def said(child: Process, word: str, deadline_s: float = 20.0) -> None:
    assert child.stdout is not None
    async with asyncio.timeout(deadline_s):
        while (await child.stdout.readline()).decode().strip() != word:
            assert not child.stdout.at_eof()


@pytest.mark.slow
async def test_a_killed_controller_is_replaced_within_seconds_and_one_history_is_written(
    own_nats: EmbeddedServer, eventually: Eventually, tmp_path: Path
) -> None:
    async with controller(own_nats.url, "c1") as first, AsyncExitStack() as more:
        await said(first, "held")
        second = await more.enter_async_context(controller(own_nats.url, "c2"))
        speaker = await NatsJournal.connect(own_nats.url, "worker:w0", tmp_path / "spool")
        history = History()
        events: list[Recorded] = []

        async def follow() -> None:
            async for batch in speaker.read(0):
                events.extend(batch)

        def healthy(worker: str) -> bool:
            return any(
                isinstance(e.fact, HealthChanged)
                and e.fact.worker == worker
                and e.fact.after is HealthStatus.HEALTHY
                for e in events
            )

        following = asyncio.create_task(follow())
        try:
            speaker.observe(history.joined("w0"))
            speaker.observe(history.passed("w0", check="join"))
            await eventually(lambda: healthy("w0"))
            assert second.returncode is None
            killed_at = time.monotonic()
            first.send_signal(signal.SIGKILL)
            await first.wait()
            speaker.observe(history.joined("w1"))
            speaker.observe(history.passed("w1", check="join"))
            await eventually(lambda: healthy("w1"), 20)
            assert (
                time.monotonic() - killed_at < 10
            )  # 1.5 s on a quiet machine; measured in benchmarks/store/journal.py
            await own_nats.kill()  # and the broker too
            again = await start_nats(own_nats.directory, port=own_nats.port)
            speaker.observe(history.joined("w2"))
            speaker.observe(history.passed("w2", check="join"))
            await eventually(lambda: healthy("w2"), 20)
            await again.kill()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await speaker.close()
    numbers = [event.fact.number for event in events if isinstance(event.fact, Decision)]
    assert numbers == list(range(1, len(numbers) + 1))
    by = [event.source.split(":")[1] for event in events if isinstance(event.fact, Decision)]
    assert set(by) == {"c1", "c2"} and by == sorted(by)
