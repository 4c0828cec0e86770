"""Workers with stopped processes recover automatically, and operator commands work on them meanwhile."""

import os
import signal
from typing import Any

import psutil
import pytest
from fleet import holdfast, running

from benchmarks.local_fleet import LocalFleet

WORKERS = 4
FLAGS = (
    *("--workers", str(WORKERS), "--chaos", "--itl-ms", "10", "--canary-interval", "0.5"),
    *("--breaker-wait", "0.5", "--breaker-backoff", "1"),
)
SOON = {"HOLDFAST_CONTROLLER__POLICY__HEALTH__DEAD_AFTER": "4"}


def processes(status: dict[str, Any]) -> dict[str, int]:
    return {worker["id"]: worker["pid"] for worker in status["workers"]}


async def back(fleet: LocalFleet, before: dict[str, int], *names: str) -> dict[str, int]:
    """Wait until all workers serve, these in new processes; return their pids."""

    def holds(status: dict[str, Any]) -> bool:
        fresh = all(pid != before[name] for name, pid in processes(status).items() if name in names)
        well = (w["health"] == "HEALTHY" and w["weight"] == 1 for w in status["workers"])
        return fresh and all(well)

    return processes(await fleet.until(holds, 60))


async def test_hung_workers_recover(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with running(tmp_path_factory.mktemp("hung") / "fleet", *FLAGS, environment=SOON) as fleet:
        first = processes(await fleet.healthy(WORKERS))
        done = holdfast("chaos", "hang", "w3", "--for", "0.5", "--data", str(fleet.data))
        assert (done.returncode, done.stdout) == (0, "w3: hang\n"), done.stderr
        hung = psutil.Process(first["w3"])
        await fleet.until(lambda status: hung.status() != psutil.STATUS_STOPPED)
        assert (await back(fleet, first))["w3"] == first["w3"], "it continued by itself"

        for name in ("w0", "w1"):  # with more at once, the observer would assume its own failure
            os.kill(first[name], signal.SIGSTOP)
        second = await back(fleet, first, "w0", "w1")
        said = fleet.log.read_text()
        assert all(f"{name} was declared dead" in said for name in ("w0", "w1")), said

        os.kill(second["w2"], signal.SIGSTOP)
        done = holdfast("restart", "--rolling", "--within", "60", "--data", str(fleet.data))
        assert done.returncode == 0, done.stderr
        third = await back(fleet, second, *second)
        assert done.stdout.count(" is back (pid ") == WORKERS, done.stdout
        assert not {*second.values()} & {*third.values()}
