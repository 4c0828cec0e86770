"""The servers of `holdfast up`: what happens to a fleet whose database cannot come back."""

import asyncio
import os
import signal
from pathlib import Path

from controller.demo.fleet import Fleet

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
