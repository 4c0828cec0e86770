"""A fleet with spares loses groups of eight ranks with running streams: no token is lost."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fleet import holdfast, running, streamed, undisturbed

from benchmarks.local_fleet import LocalFleet
from events.decisions import SpareActivated
from events.observations import RequestAbandoned, RequestMigrated

FLAGS = ("--workers", "2", "--spares", "1", "--itl-ms", "40", "--planner-mode", "off")
# workers are killed here: a worker paused by a busy machine for a while must not be replaced
GROUPS = {"HOLDFAST_WORKER_TP": "8", "HOLDFAST_CONTROLLER__LIVENESS__ANSWER_S": "5"}
STREAMS, TOKENS = 6, 200


def have(wanted: dict[str, str], status: dict[str, Any]) -> bool:
    """Return whether the workers of a fleet have these roles."""
    return roles(status) == wanted


def roles(status: dict[str, object]) -> dict[str, str]:
    """Return the role of each healthy worker of a fleet: spare, or the worker that it replaces."""
    workers = status["workers"]
    assert isinstance(workers, list)
    return {
        w["id"]: "spare" if w["spare"] else w["place"] or w["id"]
        for w in workers
        if w["health"] == "HEALTHY" and w["weight"] == (0 if w["spare"] else 1)
    }


async def kill(fleet: LocalFleet, name: str) -> None:
    status = await fleet.status()
    os.kill(next(w["pid"] for w in status["workers"] if w["id"] == name), signal.SIGKILL)


@pytest.mark.attack
async def test_a_spare_replaces_a_failed_group_which_becomes_the_spare(tmp_path: Path) -> None:
    async with running(tmp_path / "fleet", *FLAGS, environment=GROUPS, stops=True) as fleet:
        await fleet.until(lambda s: roles(s) == {"w0": "w0", "w1": "w1", "s0": "spare"})
        shown = (await asyncio.to_thread(holdfast, "status", "--data", str(fleet.data))).stdout
        assert "spares       1 of 1 ready for sim" in shown
        for lost, now in (
            ("w0", {"w0": "spare", "w1": "w1", "s0": "w0"}),
            ("w1", {"w0": "w1", "w1": "spare", "s0": "w0"}),
        ):
            asked = [asyncio.ensure_future(streamed(fleet, [300 + n] * 20, TOKENS)) for n in range(STREAMS)]
            await fleet.until(lambda s: sum(w["in_flight"] or 0 for w in s["workers"]) >= STREAMS)
            await kill(fleet, lost)
            assert [await one for one in asked] == [
                undisturbed([300 + n] * 20, TOKENS) for n in range(STREAMS)
            ]
            await fleet.until(partial(have, now))
        facts = [event.fact for event in await fleet.events()]
        verified = await asyncio.to_thread(holdfast, "replay", "verify", "--data", str(fleet.data))
        told = await asyncio.to_thread(holdfast, "replay", "timeline", "--data", str(fleet.data))
    activated = [(one.worker, one.replaces) for one in facts if isinstance(one, SpareActivated)]
    assert activated == [("s0", "w0"), ("w0", "w1")]
    assert any(isinstance(one, RequestMigrated) for one in facts)
    assert not any(isinstance(one, RequestAbandoned) for one in facts)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "spare s0 replaces w0" in told.stdout
