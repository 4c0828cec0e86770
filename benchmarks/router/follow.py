"""Measures the delay, rate and cost with which frontends learn the content of workers' prefix caches.

    python -m benchmarks follow [--workers 100] [--steps 20000] [--blocks 64000]

Workers and one frontend in one process, over a real broker.

    delay     from a step's stored blocks until the index finds them, without other load; 5 ms of it gather events
    events    steps per second, of 8 blocks stored and 8 removed each, from the announcement until the index has the last
    restore   how long a frontend that has just started takes to learn `--blocks` blocks of one worker, and the longest pause of
              everything else in its loop

Prints one JSON object per row.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from benchmarks.registration import played_worker
from benchmarks.rows import Row, command_line, show
from controller.adapters.embedded.nats import start_nats
from controller.adapters.feeds.kv_events import KvEvents
from events.kv import KvEvent, Removed, Stored
from events.nats.connection import BrokerConnection
from events.observations import Profile, WorkerJoined
from workers.kv_events.publisher import KvPublisher

PROFILE = Profile(kv_blocks=1, block_tokens=16, max_batch=1, prefill_tokens_per_s=1.0, tpot_ms=((1, 1.0),))
DELAYS = 200
STEP_BLOCKS = 8
AT_ONCE = 200  # steps per turn of the loop
POLL_S = 0.0005
DEADLINE_S = 120.0


def joined(name: str) -> WorkerJoined:
    """Return the registration of a worker that publishes KV events."""
    return played_worker(name, PROFILE, instance="i", model="m", kv_events=True)


class Fleet:
    """Workers and one frontend."""

    def __init__(self, url: str, count: int) -> None:
        self.url, self.names = url, [f"w{number}" for number in range(count)]
        self.publishers: dict[str, KvPublisher] = {}
        self.dice = random.Random(1)

    async def start(self) -> None:
        """Start publishing."""
        self._connection = await BrokerConnection.open(self.url, "workers")
        for name in self.names:
            publisher = self.publishers[name] = KvPublisher(name, "i", self._connection)
            publisher.start(1)
            await publisher.subscribe()

    async def close(self) -> None:
        """Stop publishing."""
        for publisher in self.publishers.values():
            await publisher.close()
        await self._connection.close()

    def blocks(self, count: int) -> list[int]:
        """Return block names that no worker has."""
        return [self.dice.getrandbits(64) for _ in range(count)]

    async def follow(self) -> tuple[KvEvents, "asyncio.Task[None]"]:
        """Start a frontend."""
        frontend = await KvEvents.open(self.url, "frontend")
        running = asyncio.create_task(frontend.run())
        frontend.absorb(map(joined, self.names))
        await until(lambda: frontend.view.health.complete == len(self.names))
        return frontend, running


async def until(condition: Callable[..., object]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (the condition has no event)
            await asyncio.sleep(POLL_S)


async def delay(fleet: Fleet, frontend: KvEvents) -> Row:
    """Measure how long one step's events take."""
    taken = []
    for number in range(DELAYS):
        names = fleet.blocks(STEP_BLOCKS)
        began = time.perf_counter()
        fleet.publishers[fleet.names[number % len(fleet.names)]].announce(0, [Stored(names)])
        await until(lambda names=names: frontend.view.index.find(names).device)
        taken.append(1000 * (time.perf_counter() - began))
    taken.sort()
    return {"p50_ms": round(taken[DELAYS // 2], 1), "p99_ms": round(taken[DELAYS * 99 // 100], 1)}


async def events(fleet: Fleet, frontend: KvEvents, steps: int) -> Row:
    """Measure how many steps per second arrive."""
    before: dict[str, list[int]] = {}
    began = time.perf_counter()
    for number in range(steps):
        name = fleet.names[number % len(fleet.names)]
        new = fleet.blocks(STEP_BLOCKS)
        said: list[KvEvent] = [Stored(new), Removed(before.get(name, []))]
        fleet.publishers[name].announce(0, said)
        before[name] = new
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)
    await until(lambda: all(frontend.view.index.find(names).device for names in before.values()))
    lasted = time.perf_counter() - began
    lost = sum(publisher.dropped for publisher in fleet.publishers.values())
    return {"steps_per_s": round(steps / lasted), "gaps": frontend.view.counts.gaps, "lost": lost}


async def restore(fleet: Fleet, blocks: int) -> Row:
    """Measure how long a new frontend takes, and how long it blocks its loop."""
    names = fleet.blocks(blocks)
    for first in range(0, blocks, 64):
        fleet.publishers["w0"].announce(0, [Stored(names[first : first + 64])])
    await asyncio.sleep(0.1)
    pauses = [0.0]

    async def feel() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0)
            pauses.append(time.perf_counter() - before)

    feeling = asyncio.create_task(feel())
    began = time.perf_counter()
    frontend, running = await fleet.follow()
    lasted = time.perf_counter() - began
    feeling.cancel()
    assert len(frontend.view.index) >= blocks
    running.cancel()
    await frontend.close()
    return {"blocks": blocks, "ms": round(1000 * lasted), "pause_ms_max": round(1000 * max(pauses), 1)}


async def measure(args: argparse.Namespace, folder: Path) -> None:
    """Measure everything."""
    server = await start_nats(folder)
    try:
        fleet = Fleet(server.url, args.workers)
        await fleet.start()
        frontend, running = await fleet.follow()
        about = {"workers": args.workers}
        show({"figure": "delay", **about, **await delay(fleet, frontend)})
        show({"figure": "events", **about, **await events(fleet, frontend, args.steps)})
        running.cancel()
        await frontend.close()
        show({"figure": "restore", **about, **await restore(fleet, args.blocks)})
        await fleet.close()
    finally:
        await server.kill()


def main() -> None:
    """Measure and print."""
    parser = command_line("follow", __doc__)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=64_000)
    args = parser.parse_args()
    if min(args.workers, args.steps, args.blocks) < 1:
        parser.error("--workers, --steps and --blocks must be 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(measure(args, Path(folder)))


if __name__ == "__main__":
    main()
