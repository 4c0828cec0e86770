"""Measures how long after an Xid in the driver no router sends requests to the worker.

    python -m benchmarks xid [--trials 30]

A whole fleet (`holdfast up`, two workers), a third worker beside it, and a device watch for that one (`--watch-only`)
with the tests' driver stand-in. Measured from the driver's event, on three tables, held as routers hold them: the time until
the last of them has no weight for the worker, and until it has the decision. For workers that watch their own GPU and end with
it, also measured: the time until the connection to a frontend ends.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.failures.faults import spread
from benchmarks.failures.verdict import FLAGS, VIEWS, WITHIN_S
from benchmarks.local_fleet import LocalFleet
from controller.router.endpoints import Endpoint, EndpointTable
from controller.runtime.view import FleetView
from events import wire
from events.decisions import HealthStatus
from events.journal.nats import NatsJournal
from events.observations import ResumeRequested

SHIM = Path(__file__).parents[2] / "tests" / "workers" / "devices"
NAME = "g0"
BEATS_S = 3.0
CODES = (48, 79)  # in turn: an Xid that is reported already is no change


class Routers:
    """Tables of the fleet as routers hold them."""

    def __init__(self, views: list[FleetView]) -> None:
        self.views = views
        self.tables = [EndpointTable() for _ in views]
        self._moved = asyncio.Event()
        for view, table in zip(views, self.tables, strict=True):
            view.listen(partial(self._absorb, table))

    def _absorb(self, table: EndpointTable, view: FleetView, batch: object) -> None:
        table.absorb(view.fleet)
        self._moved.set()

    async def until(self, holds: Callable[[FleetView, Endpoint | None], bool]) -> float:
        """Return when `holds` was true of the last of them."""
        async with asyncio.timeout(WITHIN_S):
            while not all(holds(v, self._endpoint(t)) for v, t in zip(self.views, self.tables, strict=True)):
                self._moved.clear()
                await self._moved.wait()
        return time.perf_counter()

    def _endpoint(self, table: EndpointTable) -> Endpoint | None:
        return next((endpoint for endpoint in table.endpoints.values() if endpoint.worker == NAME), None)


def _routed(view: FleetView, endpoint: Endpoint | None) -> bool:
    return endpoint is not None and endpoint.routable


def _not_routed(view: FleetView, endpoint: Endpoint | None) -> bool:
    return endpoint is None or not endpoint.routable


def _decided(view: FleetView, endpoint: Endpoint | None) -> bool:
    return view.fleet.workers[NAME].health.status is HealthStatus.UNHEALTHY


async def _trials(url: str, gpu: Any, trials: int) -> tuple[list[float], list[float]]:
    journal = await NatsJournal.connect(url, "bench:xid", None)
    readers = [await NatsJournal.connect(url, f"bench:view{n}", None) for n in range(VIEWS)]
    views = [FleetView(reader) for reader in readers]
    routers = Routers(views)
    following = [asyncio.create_task(view.run()) for view in views]
    out: list[float] = []
    decided: list[float] = []
    for n in range(trials):
        await routers.until(_routed)
        await asyncio.sleep(random.random())  # at any moment of the watch's second
        began = time.perf_counter()
        gpu.raise_xid(CODES[n % 2])
        out.append((await routers.until(_not_routed) - began) * 1000)
        decided.append((await routers.until(_decided) - began) * 1000)
        instance = views[0].fleet.workers[NAME].joined.instance
        journal.observe(ResumeRequested(worker=NAME, instance=instance, by="bench"))
    for task in following:
        task.cancel()
    for handle in (journal, *readers):
        await handle.close()
    return out, decided


async def _falls(data: Path, driver: dict[str, str], gpu: Any, trials: int) -> list[float]:
    """Raise an Xid under workers that watch the GPU themselves."""
    took = []
    for _ in range(trials):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        worker = _worker(data, "g1", "--gpus", "0", "--port", str(port), driver=driver)
        try:
            reader, writer = await _connected(port)
            await asyncio.sleep(random.random())
            began = time.perf_counter()
            gpu.raise_xid(CODES[0])
            async with asyncio.timeout(WITHIN_S):
                while await reader.read(65536):
                    pass
            took.append((time.perf_counter() - began) * 1000)
            writer.close()
            await asyncio.to_thread(worker.wait, 30)
        finally:
            worker.kill()
            worker.wait()
    return took


async def _connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a worker that is starting, as a frontend does."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(wire.encode(wire.Hello("bench")))
                await reader.read(1)
                return reader, writer
            await asyncio.sleep(0.05)


def _worker(data: Path, name: str, *flags: str, driver: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "controller.cli", "worker", "--data", str(data), "--name", name]
    return subprocess.Popen([*command, *flags], env={**os.environ, **driver})


def _core_s(pid: int) -> float:
    return float(sum(psutil.Process(pid).cpu_times()[:2]))


async def measure(trials: int) -> dict[str, Any]:
    """Raise Xids, and return the worker to service after each."""
    sys.path.insert(0, str(SHIM))
    shim: Any = __import__("shim")
    with tempfile.TemporaryDirectory(prefix="holdfast-xid-") as name:
        folder = Path(name)
        shim.build(folder)
        gpu = shim.gpus(folder / "gpus", 1).gpu[0]
        fleet = LocalFleet.start(folder / "data", *FLAGS[2:], "--workers", "2")
        try:
            await fleet.ready()
            driver = {"LD_LIBRARY_PATH": name, shim.STATE: str(folder / "gpus")}
            started = [_worker(fleet.data, NAME, driver={})]
            started.append(_worker(fleet.data, NAME, "--watch-only", "--gpus", "0", driver=driver))
            try:
                await fleet.until(lambda s: "watch" in {p["role"] for p in s["processes"]})
                await asyncio.sleep(BEATS_S)  # until it knows the worker it reports for
                began, spent = time.monotonic(), _core_s(started[1].pid)
                out, decided = await _trials(fleet.nats_url("controller"), gpu, trials)
                share = (_core_s(started[1].pid) - spent) / (time.monotonic() - began)
                falls = await _falls(fleet.data, driver, gpu, max(1, trials // 5))
            finally:
                for process in started:
                    process.terminate()
                    process.wait(30)
        finally:
            fleet.stop()
    return {
        "benchmark": "xid",
        "views": VIEWS,
        "out_of_every_table_ms": spread(out),
        "decided_ms": spread(decided),
        "own_engine_gone_ms": spread(falls),
        "watch_core_percent": round(share * 100, 2),  # of one core, its facts included
    }


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=30)
    print(json.dumps(asyncio.run(measure(parser.parse_args().trials))))


if __name__ == "__main__":
    main()
