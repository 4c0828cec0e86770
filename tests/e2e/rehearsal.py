"""A fleet under load that is broken in three ways, for tests that observe it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fleet import streamed

from benchmarks.local_fleet import LocalFleet

FLAGS = ("--workers", "3", "--spares", "1", "--itl-ms", "20", "--chaos", "--canary-interval", "1", "--breaker-wait", "1",
         "--breaker-backoff", "1", "--planner-mode", "propose")  # fmt: skip
BROKEN_S = 24.0
STREAMS, TOKENS = 8, 60


@contextlib.asynccontextmanager
async def users(fleet: LocalFleet) -> AsyncIterator[None]:
    """Send requests all the time."""

    async def ask(number: int) -> None:
        while True:
            with contextlib.suppress(Exception):
                await streamed(fleet, [300 + number] * 40, TOKENS)

    tasks = [asyncio.create_task(ask(n)) for n in range(STREAMS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def lasts(seconds: float) -> None:
    """Let a phase of the fleet's real time pass, as long as its record (metrics, journal, console) requires."""
    await asyncio.sleep(seconds)  # the phase itself


async def broken(fleet: LocalFleet) -> None:
    """Break the fleet in three ways, one after another: w0 is corrupt, w1 fails requests, w2 is killed."""
    for verb, worker, argument in (("corrupt", "w0", 2.0), ("error", "w1", 6.0), ("kill", "w2", None)):
        with contextlib.suppress(Exception):
            await fleet.act(verb, worker, argument)
        await lasts(BROKEN_S / 3)
