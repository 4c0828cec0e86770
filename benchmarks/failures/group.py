"""Measures how long until every request of a failed worker has been sent to another one.

    python -m benchmarks group [--how killed|unhealthy] [--requests 1000] [--tokens 2048] [--trials 5]

One frontend's director and request plane in this process, sixteen simulated workers in others. All requests begin on one of
them, which is killed, or becomes UNHEALTHY. Measured: from SIGKILL, or from the change of the fold, to the last byte of the last
request to a survivor; and how evenly the tokens to be computed again are spread over the survivors.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

import uvloop

from controller.adapters.clock import SystemClock
from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.connection import WorkerConnection
from controller.adapters.request_plane.dialers import Make, TcpConnection, TcpDialer
from controller.adapters.request_plane.worker_links import Address
from controller.frontend.director import Director, World
from controller.frontend.dispatch.live_request import LiveRequest
from controller.frontend.settings import FrontendSettings
from controller.migration.cost import MovingPolicy
from controller.processes.frontend import static_worker
from controller.simulator.simulation import quiet
from controller.simulator.stories.group_failure import computed_again, crowd, most_over_even
from events.decisions import HealthStatus
from events.observations import Profile, WorkerJoined

SURVIVORS = 15
WITHIN_S = 30.0
SLOTS = 1024
PROFILE = Profile(
    kv_blocks=1_000_000, block_tokens=16, max_batch=SLOTS, prefill_tokens_per_s=5000.0, tpot_ms=((1, 20.0),)
)
FLAGS = {
    "itl-ms": 20,
    "batch-max": SLOTS,
    "waiting-max": 4096,
    "kv-blocks": PROFILE.kv_blocks,
    "context-tokens": 8192,
    "prefill-tokens-per-s": 1e8,  # only the frontend is measured
    "admin-port": -1,
}


def start_workers(folder: str, name: str, count: int, port: int) -> subprocess.Popen[bytes]:
    """Start `count` simulated workers in one process."""
    flags = {**FLAGS, "name": name, "count": count, "port": port, "data": folder}
    command = [sys.executable, "-m", "controller.cli", "worker", "--die-with-parent"]
    command += [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 (polled as rarely as the figure allows)
            await asyncio.sleep(0.001)


def _port(count: int) -> int:
    """Return the first of `count` free ports."""
    while True:
        first = random.randrange(20_000, 32_000)  # higher ports are used for outgoing connections
        with suppress(OSError), ExitStack() as stack:
            for number in range(count):
                stack.enter_context(socket.create_server(("127.0.0.1", first + number)))
            return first


class MeasuredConnection(TcpConnection):
    """A connection to a worker that reports its unsent bytes."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the loop or the kernel has not accepted yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0


class MeasuredDialer(TcpDialer):
    """Makes such connections, and keeps a list of them."""

    def __init__(self) -> None:
        self.made: list[MeasuredConnection] = []

    async def connect(self, url: str, make: Make) -> WorkerConnection:
        """Connect to the port."""

        def measured(_: type[WorkerConnection]) -> WorkerConnection:
            connection = make(MeasuredConnection)
            assert isinstance(connection, MeasuredConnection)
            self.made.append(connection)
            return connection

        return await super().connect(url, measured)


class Fleet:
    """The killed worker, the survivors, and this process as their frontend."""

    def __init__(self) -> None:
        self._dialer = MeasuredDialer()
        self.plane = RequestPlaneClient("bench", dialers={"tcp": self._dialer})
        settings = FrontendSettings(moving=MovingPolicy(prefill_tokens_per_s=5000.0))
        world = World("bench", self.plane, lambda fact, **_: None, SystemClock())
        self.director = Director(world, settings)
        self.director.go_live()
        self.plane.listen(self.director.changed)
        self._first = _port(SURVIVORS + 1)

    async def connect(self, numbers: range) -> None:
        """Connect to these workers, and route to them."""
        wanted = {f"w{n}": Address("", f"tcp://127.0.0.1:{self._first + n}") for n in numbers}
        self.plane.set_workers(wanted)
        await until(lambda: len(self.plane.connected) == len(wanted))
        self.director.set_static([_joined(worker, life) for worker, life in self.plane.connected.items()])

    def sent(self) -> bool:
        """Whether nothing is queued for sending."""
        return not any(connection.unsent_bytes for connection in self._dialer.made)

    async def trial(self, how: str, requests: int, tokens: int) -> dict[str, float]:
        """Break the worker of all requests, and return when they had been sent to others, and how evenly."""
        with tempfile.TemporaryDirectory(prefix="holdfast-group-") as folder:
            victim = start_workers(folder, "w0", 1, self._first)
            others = start_workers(folder, "w1", SURVIVORS, self._first + 1)
            keeping = asyncio.create_task(self.plane.run())
            try:
                await self.connect(range(1))
                answers = crowd(requests, tokens, "sim", ("static", "builtin:sim"))
                waiting = self.director.driver.launch(answers)
                await until(lambda: all(live.state.has_output for live in waiting))
                await self.connect(range(SURVIVORS + 1))
                return await self._strike(how, victim, waiting)
            finally:
                keeping.cancel()
                for process in (victim, others):
                    process.kill()
                    process.wait()

    async def _strike(
        self, how: str, victim: subprocess.Popen[bytes], waiting: Sequence[LiveRequest]
    ) -> dict[str, float]:
        gone = {generation: generation.endpoint for generation in waiting}
        began = time.perf_counter()
        if how == "killed":
            os.kill(victim.pid, signal.SIGKILL)
        else:
            for endpoint in {
                generation.endpoint for generation in waiting if generation.endpoint is not None
            }:
                endpoint.status, endpoint.weight = HealthStatus.UNHEALTHY, 0.0
            self.director.changed()

        def moved() -> bool:
            return all(f.endpoint is not None and f.endpoint is not gone[f] for f in waiting)

        await until(lambda: self.director.table and moved() and self.sent())
        placed_ms = (time.perf_counter() - began) * 1000
        load = computed_again(waiting)
        await until(lambda: all(live.state.has_output for live in waiting))
        resumed_ms = (time.perf_counter() - began) * 1000
        self.director.driver.cancel(live.answer for live in waiting)
        return {
            "placed_ms": placed_ms,
            "resumed_ms": resumed_ms,
            "most_over_even": most_over_even(load, SURVIVORS),
        }


def _joined(worker: str, instance: str) -> WorkerJoined:
    return replace(static_worker(worker, instance, "sim", "builtin:sim"), profile=PROFILE)


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--how", choices=("killed", "unhealthy"), default="killed")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--trials", type=int, default=5)
    args = parser.parse_args()
    if min(args.requests, args.tokens, args.trials) < 1:
        parser.error("requests, tokens and trials must be 1 or more")
    with quiet():
        runs = [uvloop.run(_trial(args.how, args.requests, args.tokens)) for _ in range(args.trials)]
    median = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
    most = {name: round(max(run[name] for run in runs), 2) for name in runs[0]}
    print(
        json.dumps(
            {"figure": "group", "how": args.how, "requests": args.requests, "median": median, "max": most}
        )
    )


async def _trial(how: str, requests: int, tokens: int) -> dict[str, float]:
    return await Fleet().trial(how, requests, tokens)


if __name__ == "__main__":
    main()
