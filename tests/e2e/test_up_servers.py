"""A fleet with a lost database, a closed terminal, or a frontend that starts without the broker."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import first_database
import pytest
from fleet import running
from store_databases import execute
from waits import until

from benchmarks.local_fleet import LocalFleet, gone
from controller.adapters.embedded.free_port import free_port
from controller.adapters.embedded.server import die_with
from controller.processes.fleet_dir import FleetDir
from events.observations import WorkerLeft

ASK = {"prompt": [300, 301, 302], "max_tokens": 8, "temperature": 0}
FAST = ("--workers", "2", "--canary-interval", "0.5")


async def said(fleet: LocalFleet, words: str) -> None:
    """Wait until `up` has printed some text."""
    await until(lambda: words in fleet.log.read_text(), 60)


def unread(data: Path) -> LocalFleet:
    """Start a fleet as `holdfast up 2>&1 | head -0`, from a terminal: SIGHUP ends it, also if these tests run under nohup."""
    dies_with_us = die_with(os.getpid())

    def at_a_terminal() -> None:
        dies_with_us()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    port = free_port()
    command = [sys.executable, "-m", "controller.cli", "up", "--data", str(data), "--port", str(port)]
    process = subprocess.Popen(
        [*command, *FAST], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=at_a_terminal
    )
    assert process.stdout is not None
    process.stdout.close()
    return LocalFleet(data, port, process, data / "nothing")


@pytest.mark.slow
async def test_neither_a_closed_terminal_nor_a_lost_database_ends_other_processes(
    tmp_path: Path,
) -> None:
    first_database.lay_in_fleet(tmp_path / "fleet")
    fleet = unread(tmp_path / "fleet")
    try:
        await fleet.ready()
        status = await fleet.healthy(2)
        family = fleet.family()
        before = {w["id"]: w["pid"] for w in status["workers"]}["w0"]
        os.kill(before, signal.SIGKILL)
        await fleet.until(lambda s: {w["id"]: w["pid"] for w in s["workers"]}["w0"] != before)
        await fleet.healthy(2)
        fleet.process.send_signal(signal.SIGHUP)
        assert fleet.process.wait(60) == 0
        assert gone(family)
    finally:
        fleet.end()
    async with running(fleet.data, *FAST) as again:
        left = [e.fact for e in await again.events() if isinstance(e.fact, WorkerLeft)]
        assert {(f.worker, f.mode) for f in left} == {
            ("w0", "immediate"),
            ("w0", "graceful"),
            ("w1", "graceful"),
        }
        await bears_a_lost_database(again)


async def bears_a_lost_database(fleet: LocalFleet) -> None:
    """Remove the database, so that it cannot restart, and lose a worker then; restore it."""
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
    await fleet.until(lambda s: s["projector"]["lag"] == 0 and _another(s, "postgres", pids), within_s=60)


def _another(status: dict[str, Any], name: str, before: dict[str, int]) -> bool:
    """Return whether there is a new process with this name."""
    pids: dict[str, int] = {p["name"]: p["pid"] for p in status["processes"]}
    return pids.get(name, before[name]) != before[name]


@contextmanager
def frontend_without_a_broker(
    fleet: LocalFleet, name: str, port: int, log: Path
) -> Iterator[Callable[[], bool]]:
    """Run a frontend that cannot reach the broker; yield a function that says whether it still runs."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    environment |= {
        "HOLDFAST_NATS_URL": f"nats://127.0.0.1:{free_port()}",
        "HOLDFAST_DATABASE_URL": FleetDir(fleet.data).recall()["database_url"],
        "HOLDFAST_FLEET_KEY_FILE": str(FleetDir(fleet.data).key),
    }
    command = [sys.executable, "-m", "controller.cli", "frontend", "--name", name, "--port", str(port)]
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*command, "--data", str(fleet.data)], env=environment, stdout=output, stderr=output
        )
    try:
        yield lambda: child.poll() is None
    finally:
        child.kill()
        child.wait()


async def answered(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether a request is answered with all of its tokens."""
    async with http.get(f"{url}/v1/models") as models:
        served = (await models.json())["data"] if models.status == 200 else []
    if not served:
        return False
    async with http.post(f"{url}/v1/completions", json=ASK | {"model": served[0]["id"]}) as answer:
        return answer.status == 200 and (await answer.json())["usage"]["completion_tokens"] == 8


async def serves_without_a_broker(fleet: LocalFleet, name: str, log: Path) -> None:
    """Start a frontend that cannot reach the broker, and let it answer."""
    port = free_port()
    with frontend_without_a_broker(fleet, name, port, log) as runs:
        async with aiohttp.ClientSession() as http:

            async def serves() -> bool:
                assert runs(), log.read_text()
                return await answered(http, f"http://127.0.0.1:{port}")

            await until(serves, 60, f"an answer of {name}", every_s=0.2, failing=(aiohttp.ClientError,))


@pytest.mark.slow
async def test_a_frontend_that_starts_while_the_broker_is_unreachable_serves(tmp_path: Path) -> None:
    """A new fleet's snapshot is enough, and so are the events in `fleet_events` if there is no snapshot."""
    async with running(tmp_path / "fleet", "--workers", "2") as fleet:
        await fleet.healthy(2)
        url = str(FleetDir(fleet.data).recall()["database_owner_url"])
        kept = await until(lambda: execute(url, "SELECT reach FROM holdfast.snapshots"), 30, every_s=0.2)
        assert min(row["reach"] for row in kept) < 100, "the first snapshot is kept early"
        await serves_without_a_broker(fleet, "late1", tmp_path / "late1.log")
        await execute(url, "DELETE FROM holdfast.snapshots")
        await serves_without_a_broker(fleet, "late2", tmp_path / "late2.log")
