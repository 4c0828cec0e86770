"""What `holdfast up` bears: a database that cannot come back, a terminal that goes away."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from controller.demo.fleet import Fleet, gone
from controller.processes.children import die_with
from controller.processes.port import free_port
from events.observations import WorkerLeft

FAST = ("--workers", "2", "--canary-interval", "0.5")


async def test_a_database_that_cannot_come_back_keeps_nothing_else_down(tmp_path: Path) -> None:
    fleet = await Fleet.start(tmp_path / "fleet", *FAST).ready()
    try:
        status = await fleet.until(lambda s: {"postgres", "projector"} <= {p["role"] for p in s["processes"]})
        pids = {p["name"]: p["pid"] for p in status["processes"]}
        cluster, away = fleet.data / "postgres" / "data", fleet.data / "postgres" / "away"
        cluster.rename(away)
        cluster.touch()
        os.kill(pids["postgres"], signal.SIGKILL)
        await said(fleet, "postgres does not start: ")
        os.kill(pids["w0"], signal.SIGKILL)
        await fleet.until(lambda s: {w["id"]: w["pid"] for w in s["workers"]}["w0"] != pids["w0"])
        await fleet.healthy(2)
        cluster.unlink()
        away.rename(cluster)
        back = await fleet.until(lambda s: s["projector"]["lag"] == 0, within_s=60)
        assert {p["name"]: p["pid"] for p in back["processes"]}["postgres"] != pids["postgres"]
    finally:
        fleet.stop()


async def said(fleet: Fleet, words: str) -> None:
    """Wait until `up` has printed something."""
    async with asyncio.timeout(60):
        while words not in fleet.log.read_text():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)


async def test_a_terminal_that_goes_away_takes_nothing_along_but_ends_the_fleet_in_order(
    tmp_path: Path,
) -> None:
    data, port = tmp_path / "fleet", free_port()
    command = [sys.executable, "-m", "controller.cli", "up", "--data", str(data), "--port", str(port)]
    process = subprocess.Popen(  # noqa: ASYNC220 (a fork of 1 ms)
        [*command, *FAST], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=die_with(os.getpid())
    )
    assert process.stdout is not None
    process.stdout.close()  # `holdfast up 2>&1 | head -0`
    fleet = Fleet(data, port, process, tmp_path / "nothing")
    await fleet.ready()
    status = await fleet.healthy(2)
    family = fleet.family()
    before = {w["id"]: w["pid"] for w in status["workers"]}["w0"]
    os.kill(before, signal.SIGKILL)
    await fleet.until(lambda s: {w["id"]: w["pid"] for w in s["workers"]}["w0"] != before)
    await fleet.healthy(2)
    fleet.process.send_signal(signal.SIGHUP)
    assert fleet.process.wait(30) == 0
    assert gone(family)
    again = await Fleet.start(fleet.data, *FAST).ready()
    try:
        left = [e.fact for e in await again.events() if isinstance(e.fact, WorkerLeft)]
        assert {(f.worker, f.mode) for f in left} == {
            ("w0", "immediate"),
            ("w0", "graceful"),
            ("w1", "graceful"),
        }
    finally:
        again.stop()
