"""New weights under the same name, on one server after another, fail no request and need no command."""

import asyncio
import shutil
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from fleet import running
from upstream import Upstream
from waits import until

from benchmarks.local_fleet import LocalFleet
from events.json_types import JsonView
from events.token_bytes import BUILTIN_FILE

pytestmark = pytest.mark.attack
BETWEEN_S = 8.0
DOWN_S = 1.5
RETURNS_S = 60.0


class Load:
    """Sends one short request after another, and counts the outcomes."""

    def __init__(self, fleet: LocalFleet) -> None:
        self.outcomes: Counter[str] = Counter()
        self._fleet = fleet
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(3)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, number: int) -> None:
        async with aiohttp.ClientSession() as http:
            while True:
                number += 3
                prompt = [300 + (7 * number + 13 * k) % 1500 for k in range(20)]
                body = {
                    "model": "up",
                    "prompt": prompt,
                    "max_tokens": 12,
                    "ignore_eos": True,
                    "temperature": 0,
                }
                async with http.post(self._fleet.url + "/v1/completions", json=body) as response:
                    said = await response.json()
                    suspect = "suspect" if "X-Holdfast-Suspect" in response.headers else "plain"
                    self.outcomes[suspect if response.status == 200 else str(said)] += 1
                await asyncio.sleep(0.05)  # the rate of the load

    @property
    def failed(self) -> dict[str, int]:
        return {what: count for what, count in self.outcomes.items() if what not in ("plain", "suspect")}


async def update(server: Upstream, *, restart: bool, told: bool) -> None:
    """Give a server new weights; with `restart` it is down meanwhile. `told`: it lists them as its `root`."""
    if restart:
        port = int(server.url.rpartition(":")[2])
        await server.stop()
        await asyncio.sleep(DOWN_S)  # how long the server is down
        server.weights = "-new"
        server.root = "/models/new" if told else server.root
        await server.start(port)
    server.weights = "-new"


async def asked(server: Upstream) -> None:
    """Wait until a canary has reached a restarted server: on a slow machine its breaker may have opened meanwhile, and with
    two servers the next one must not restart before the fleet has noticed the first."""
    server.bodies.clear()
    came = lambda: any("cache_salt" in body for body in server.bodies)  # noqa: E731
    await until(came, RETURNS_S, "a canary at the server")


async def another_may_serve(fleet: LocalFleet, number: int) -> None:
    """Wait until another worker serves, or is known to be out of service only because its answers have changed.

    A server that restarts before takes down the last worker, which no fault tolerance can hide.
    """

    def serves(worker: JsonView) -> bool:
        return bool(
            worker["weight"] == 1 or worker["held"] or "health UNHEALTHY: token_mismatch" in worker["reasons"]
        )

    await fleet.until(lambda s: any(serves(w) for w in s["workers"] if w["id"] != f"w{number}"), RETURNS_S)


@pytest.mark.parametrize(
    ("order", "restart", "told", "between_s", "control"),
    [
        ((0, 1), False, False, BETWEEN_S, "none"),
        ((0, 1), True, False, BETWEEN_S, "none"),
        ((1, 0), True, False, BETWEEN_S, "none"),
        ((1, 0), True, False, BETWEEN_S, "deadline"),
        ((1, 0), True, True, BETWEEN_S, "none"),
        ((2, 0, 1), True, False, BETWEEN_S, "none"),
        ((7, 2, 5, 0, 3, 6, 1, 4), True, False, BETWEEN_S / 2, "none"),
    ],
    ids=[
        "two",
        "two-restarted",
        "two-restarted-in-turn",
        "two-by-deadlines",
        "two-told",
        "three-restarted",
        "eight-restarted",
    ],
)
async def test_a_rolling_update_loses_no_request_and_its_workers_return_by_themselves(
    tmp_path: Path, order: tuple[int, ...], restart: bool, told: bool, between_s: float, control: str
) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(BUILTIN_FILE, tmp_path / "model" / "tokenizer.json")
    servers = [await Upstream(token_s=0.005, root="/models/old" if told else "").start() for _ in order]
    flags = [
        "--engine",
        "openai",
        "--admission-control",
        control,
        "--canary-interval",
        "1",
        "--model",
        str(tmp_path / "model"),
    ]
    flags += [flag for server in servers for flag in ("--upstream", server.url)]
    async with running(tmp_path / "fleet", *flags) as fleet:
        await fleet.healthy(len(order))
        async with Load(fleet) as load:
            await until(lambda: load.outcomes["plain"] >= 100, RETURNS_S)  # of undisturbed load
            for number in order:
                await another_may_serve(fleet, number)
                await update(servers[number], restart=restart, told=told)
                if restart:
                    await asked(servers[number])
                await asyncio.sleep(between_s)  # the pause between two updates is what varies
            await fleet.until(
                lambda s: sum(w["health"] == "HEALTHY" and w["weight"] == 1 for w in s["workers"]) >= 2,
                RETURNS_S,
            )
        assert load.failed == {}
        assert load.outcomes["plain"]
    for server in servers:
        await server.stop()
