"""How long from an Xid in the driver until the worker is out of every router's table?

    python -m benchmarks.xid [--trials 30]

A whole fleet (`holdfast up`, two workers) and a third worker beside it whose driver is the tests' stand-in. Measured: the
driver's event → the last of three views, held as routers hold them, shows weight 0.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.faults import spread
from benchmarks.verdict import FLAGS, VIEWS, WITHIN_S
from controller.demo.fleet import Fleet
from controller.processes.operator import find
from controller.runtime.view import FleetView
from events.journal.nats import NatsJournal
from events.observations import ResumeRequested

SHIM = Path(__file__).parents[1] / "tests" / "workers" / "devices"
CODES = (48, 79)  # in turn: an Xid that stands already is no news


class Routers:
    """Views of the fleet as routers hold them."""

    def __init__(self, views: list[FleetView]) -> None:
        self.views = views
        self._moved = asyncio.Event()
        for view in views:
            view.listen(lambda *_: self._moved.set())

    async def until(self, routed: bool) -> float:
        """Return when the last table had the worker in it, or no longer."""
        async with asyncio.timeout(WITHIN_S):
            while any(self._routed(view) is not routed for view in self.views):
                self._moved.clear()
                await self._moved.wait()
        return time.perf_counter()

    def _routed(self, view: FleetView) -> bool:
        worker = view.fleet.workers.get("g0")
        return worker is not None and worker.routable


async def _trials(url: str, gpu: Any, trials: int) -> list[float]:
    journal = await NatsJournal.connect(url, "bench:xid", None)
    readers = [await NatsJournal.connect(url, f"bench:view{n}", None) for n in range(VIEWS)]
    views = [FleetView(reader) for reader in readers]
    following = [asyncio.create_task(view.run()) for view in views]
    routers, took = Routers(views), []
    for n in range(trials):
        await routers.until(True)
        began = time.perf_counter()
        gpu.raise_xid(CODES[n % 2])
        took.append((await routers.until(False) - began) * 1000)
        instance = views[0].fleet.workers["g0"].joined.instance
        journal.observe(ResumeRequested(worker="g0", instance=instance, by="bench"))
    for task in following:
        task.cancel()
    for handle in (journal, *readers):
        await handle.close()
    return took


def _worker(data: Path, driver: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "controller.cli", "worker", "--data", str(data), "--name", "g0"]
    return subprocess.Popen([*command, "--gpus", "0"], env={**os.environ, **driver})


async def measure(trials: int) -> dict[str, Any]:
    """Raise Xids, and take the worker back after each."""
    sys.path.insert(0, str(SHIM))
    shim: Any = __import__("shim")
    with tempfile.TemporaryDirectory(prefix="holdfast-xid-") as name:
        folder = Path(name)
        shim.build(folder)
        gpu = shim.gpus(folder / "gpus", 1).gpu[0]
        fleet = Fleet.start(folder / "data", *FLAGS[2:], "--workers", "2")
        try:
            await fleet.ready()
            worker = _worker(fleet.data, {"LD_LIBRARY_PATH": name, shim.STATE: str(folder / "gpus")})
            try:
                took = await _trials(find(fleet.data)["nats_url"], gpu, trials)
            finally:
                worker.terminate()
                worker.wait(30)
        finally:
            fleet.stop()
    return {"benchmark": "xid", "views": VIEWS, "out_of_every_table_ms": spread(took)}


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=30)
    print(json.dumps(asyncio.run(measure(parser.parse_args().trials))))


if __name__ == "__main__":
    main()
