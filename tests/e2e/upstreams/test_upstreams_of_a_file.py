"""A fleet in front of a file of upstreams: they come and go under load, and no stream is lost."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fleet import client, holdfast, running
from upstream import Upstream

from benchmarks.local_fleet import LocalFleet
from events.process.presence import present
from events.token_bytes import BUILTIN_FILE

FLAGS = ("--engine", "openai", "--canary-interval", "0.2", "--breaker-wait", "0.3", "--breaker-backoff", "1")
TOKENS = 60

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@dataclass
class World:
    """A fleet in front of the first three of four servers."""

    fleet: LocalFleet
    file: Path
    servers: list[Upstream]

    async def run(self, *words: str) -> str:
        done = await asyncio.to_thread(holdfast, *words, "--data", str(self.fleet.data))
        return done.stdout + done.stderr


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("upstreams")
    shutil.copy(BUILTIN_FILE, folder / "tokenizer.json")
    servers = [await Upstream(token_s=0.005).start() for _ in range(4)]
    file = folder / "up.yaml"
    file.write_text(
        "upstreams:\n" + "".join(f"  - {{name: g{n}, url: '{servers[n].url}'}}\n" for n in range(3))
    )
    async with running(folder / "fleet", *FLAGS, "--model", str(folder), "--upstreams", str(file)) as fleet:
        yield World(fleet, file, servers)
    for server in servers:
        await server.stop()


async def text(fleet: LocalFleet, number: int) -> str:
    async with client(fleet) as api:
        prompt = [300 + (7 * number + 13 * k) % 1500 for k in range(20)]
        stream = await api.completions.create(
            model="up", prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )  # fmt: skip
        pieces = [chunk.choices[0] async for chunk in stream if chunk.choices]
        assert pieces[-1].finish_reason == "length"
        return "".join(piece.text for piece in pieces)


async def answers(fleet: LocalFleet) -> list[str]:
    return list(await asyncio.gather(*(text(fleet, number) for number in range(6))))


def alive(status: Any) -> set[str]:
    return {worker["id"] for worker in status["workers"] if worker["health"] != "DEAD"}


async def test_one_process_runs_all_workers(world: World) -> None:
    status = await world.fleet.healthy(3)
    assert {worker["pid"] for worker in status["workers"]} == {
        one.pid for one in present(world.fleet.data) if one.role == "worker"
    }
    assert len(present(world.fleet.data)) > 1


async def test_upstreams_come_and_go_under_load(world: World) -> None:
    await world.fleet.healthy(3)
    expected = await answers(world.fleet)
    running_answers = asyncio.ensure_future(answers(world.fleet))
    assert "g0 has left" in await world.run("upstream", "remove", "g0")
    assert await running_answers == expected
    running_answers = asyncio.ensure_future(answers(world.fleet))
    assert "g3 serves" in await world.run("upstream", "add", "g3", world.servers[3].url)
    status = await world.fleet.until(lambda s: alive(s) == {"g1", "g2", "g3"})
    await world.fleet.until(lambda s: all(w["weight"] == 1 for w in s["workers"] if w["id"] == "g3"))
    assert await running_answers == expected
    assert not any(worker["lingers"] for worker in status["workers"])
    before = len(world.servers[0].bodies)
    assert await answers(world.fleet) == expected
    assert len(world.servers[0].bodies) == before


async def test_a_killed_process_comes_back_with_all_upstreams(world: World) -> None:
    await world.fleet.until(lambda s: alive(s) == {"g1", "g2", "g3"})
    before = {w["id"]: w["instance"] for w in (await world.fleet.status())["workers"]}
    (process,) = (one for one in present(world.fleet.data) if one.role == "worker")
    os.kill(process.pid, signal.SIGKILL)
    await world.fleet.until(
        lambda s: all(
            w["instance"] != before[w["id"]] and w["health"] == "HEALTHY"
            for w in s["workers"]
            if w["id"] in ("g1", "g2", "g3")
        )
    )
    await answers(world.fleet)
