"""A frontend that starts while the broker is away serves by what the state store holds."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
from fleet import running
from store_databases import execute

from controller.adapters.embedded.free_port import free_port
from controller.demo.fleet import DemoFleet
from controller.processes.fleet_dir import FleetDir

ASK = {"prompt": [300, 301, 302], "max_tokens": 8, "temperature": 0}


@contextmanager
def frontend_without_a_broker(
    fleet: DemoFleet, name: str, port: int, log: Path
) -> Iterator[Callable[[], bool]]:
    """Run a frontend that cannot reach the broker; yield whether it still runs."""
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


async def serves_without_a_broker(fleet: DemoFleet, name: str, log: Path) -> None:
    """Start a frontend that cannot reach the broker, and have it answer."""
    port = free_port()
    with frontend_without_a_broker(fleet, name, port, log) as runs:
        loop = asyncio.get_running_loop()
        until = loop.time() + 60
        async with aiohttp.ClientSession() as http:
            while runs() and loop.time() < until:
                with suppress(aiohttp.ClientError):
                    if await answered(http, f"http://127.0.0.1:{port}"):
                        return
                await asyncio.sleep(0.2)
    raise AssertionError(log.read_text())


async def test_a_frontend_that_starts_while_the_broker_is_away_serves(tmp_path: Path) -> None:
    """A young fleet's snapshot is enough, and so are the events in `fleet_events` where there is no snapshot."""
    async with running(tmp_path / "fleet", "--workers", "2") as fleet:
        await fleet.healthy(2)
        url = str(FleetDir(fleet.data).recall()["database_owner_url"])
        async with asyncio.timeout(30):
            while not (kept := await execute(url, "SELECT reach FROM holdfast.snapshots")):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert min(row["reach"] for row in kept) < 100, "the first snapshot is kept early"
        await serves_without_a_broker(fleet, "late1", tmp_path / "late1.log")
        await execute(url, "DELETE FROM holdfast.snapshots")
        await serves_without_a_broker(fleet, "late2", tmp_path / "late2.log")
