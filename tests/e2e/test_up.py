"""`holdfast up` from a user's view: it starts, resumes, stops gracefully, and leaves nothing behind."""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from fleet import holdfast, running
from waits import until

from benchmarks.local_fleet import LocalFleet, gone
from controller.adapters.embedded.free_port import free_port
from events.observations import WorkerJoined, WorkerLeft
from workers.keeper import NAME

FAST = ("--workers", "2", "--canary-interval", "0.5")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "fleet"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    """A whole fleet for tests that only observe it, or break processes that recover; it must still stop gracefully."""
    async with running(
        tmp_path_factory.mktemp("up") / "fleet", *FAST, "--frontends", "2", stops=True
    ) as made:
        yield made


@pytest.mark.slow
async def test_a_second_up_on_a_busy_directory_is_refused(fleet: LocalFleet) -> None:
    done = holdfast("up", "--data", str(fleet.data), "--port", "18998")
    assert done.returncode == 1
    assert "Another `holdfast up` is running on this data directory" in done.stderr


@pytest.mark.slow
async def test_status_events_and_chaos_as_an_operator_types_them(fleet: LocalFleet) -> None:
    data = fleet.data
    await fleet.healthy(2)
    await fleet.until(lambda s: {"postgres", "projector"} <= {p["role"] for p in s["processes"]})
    status = json.loads(holdfast("status", "-o", "json", "--data", str(data)).stdout)
    assert set(status) >= {"workers", "processes", "levels", "journal", "projector", "leader"}
    keys = {
        "id",
        "instance",
        "pid",
        "engine",
        "model",
        "health",
        "breaker",
        "weight",
        "spare",
        "place",
        "in_flight",
        "last_canary",
    }
    assert all(set(w) >= keys for w in status["workers"])
    roles = sorted(p["role"] for p in status["processes"])
    assert roles == [
        "controller",
        "frontend",
        "frontend",
        "nats",
        "postgres",
        "projector",
        "worker",
        "worker",
    ]
    assert all(psutil.pid_exists(p["pid"]) for p in status["processes"])
    assert "HEALTHY" in holdfast("status", "--data", str(data)).stdout
    lines = holdfast(
        "events", "--kind", "worker_joined", "-o", "json", "--data", str(data)
    ).stdout.splitlines()
    assert {json.loads(line)["body"]["worker"] for line in lines} == {"w0", "w1"}
    refused = holdfast("chaos", "kill", "w0", "--data", str(data))
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "--chaos" in refused.stderr
    unknown = holdfast("drain", "w77", "--data", str(data))
    assert unknown.returncode == 1 and "w77" in unknown.stderr
    drained = holdfast("drain", "w1", "--data", str(data))
    assert drained.returncode == 0, drained.stderr
    await fleet.until(lambda s: {w["id"]: w["health"] for w in s["workers"]}["w1"] in ("DRAINING", "DEAD"))
    assert holdfast("resume", "w1", "--data", str(data)).returncode == 0
    await fleet.healthy(2)
    again = holdfast("resume", "w0", "--data", str(data))
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert "nothing to resume" in again.stderr


def replaced(killed: dict[str, Any], status: dict[str, Any]) -> bool:
    """Return whether another process has the name of a killed one."""
    return any(
        (p["role"], p["name"]) == (killed["role"], killed["name"]) and p["pid"] != killed["pid"]
        for p in status["processes"]
    )


@pytest.mark.slow
async def test_every_kind_of_killed_child_is_restarted(fleet: LocalFleet) -> None:
    await fleet.healthy(2)
    before = len(await fleet.events())
    whole = await fleet.until(lambda s: {"postgres", "projector"} <= {p["role"] for p in s["processes"]})
    for killed in whole["processes"]:
        os.kill(killed["pid"], signal.SIGKILL)
        await fleet.until(
            partial(replaced, killed),
            60,
        )
    await fleet.healthy(2)
    left = [e.fact for e in await fleet.events(before) if isinstance(e.fact, WorkerLeft)]
    assert sorted((f.worker, f.mode, f.exit) for f in left) == [
        ("w0", "immediate", 137),
        ("w1", "immediate", 137),
    ]


@pytest.mark.slow
async def test_ctrl_c_stops_all_gracefully_a_second_up_resumes_and_a_killed_one_leaves_no_orphan(
    data: Path,
) -> None:
    async with running(data, *FAST) as fleet:
        await fleet.healthy(2)
        before = await fleet.events()
        family = fleet.family()
        assert fleet.stop() == 0, fleet.last_words()
        assert gone(family)
    async with running(data, *FAST) as again:
        await again.healthy(2)
        after = await again.events()
        assert [e.id for e in after[: len(before)]] == [e.id for e in before]
        left = [e.fact for e in after if isinstance(e.fact, WorkerLeft)]
        assert {(f.worker, f.mode, f.exit) for f in left} == {("w0", "graceful", 0), ("w1", "graceful", 0)}
        assert sum(isinstance(e.fact, WorkerJoined) for e in after) == 4
        await again.until(lambda s: s["projector"]["lag"] == 0)  # a fleet serves before its database is ready
        verify = holdfast("replay", "verify", "--data", str(data))
        assert verify.returncode == 0, verify.stdout + verify.stderr
        rebuilt = holdfast("replay", "rebuild", "--data", str(data))
        assert rebuilt.returncode == 0, rebuilt.stdout + rebuilt.stderr
        assert holdfast("replay", "verify", "--data", str(data)).returncode == 0
        await again.until(lambda s: {"postgres", "projector"} <= {p["role"] for p in s["processes"]})
        family = again.family()
        assert len(family) >= 10, (
            "supervisor, nats, postgres, controller, projector, frontend, two workers and their keepers"
        )
        if sys.platform == "linux":
            assert sum(p.name() == NAME.decode() for p in family) == 2
        os.kill(again.process.pid, signal.SIGKILL)
        again.process.wait()
        assert gone(family)


@pytest.mark.slow
async def test_of_two_that_start_at_once_on_one_port_only_one_does_and_its_lone_worker_is_not_restarted(
    tmp_path: Path,
) -> None:
    port = free_port()
    fleets = [LocalFleet.start(tmp_path / name, "--workers", "1", port=port) for name in ("a", "b")]
    try:
        await until(lambda: any(f.process.poll() is not None for f in fleets), 60)
        assert {f.process.poll() for f in fleets} == {None, 1}
        (loser,), (winner,) = (
            [f for f in fleets if (f.process.poll() is None) is alive] for alive in (False, True)
        )
        assert f"127.0.0.1:{port} cannot be used: The port is in use" in loser.last_words()
        await winner.ready()
        pid = (await winner.until(lambda s: bool(s["workers"])))["workers"][0]["pid"]
        refused = holdfast("restart", "w0", "--within", "1", "--data", str(winner.data))
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert "w0 cannot be spared: no other worker of its model serves requests" in refused.stderr
        assert (await winner.status())["workers"][0]["pid"] == pid
        assert winner.stop() == 0, winner.last_words()
    finally:
        for fleet in fleets:
            fleet.end()
