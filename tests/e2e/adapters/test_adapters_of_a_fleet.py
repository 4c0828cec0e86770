"""LoRA adapters of a fleet in front of three servers: loaded, unloaded, and lost in a stream."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from fleet import client, running
from upstream import Upstream
from waits import until

from benchmarks.local_fleet import LocalFleet
from events.token_bytes import BUILTIN_FILE

FLAGS = ("--engine", "openai", "--canary-interval", "0.5", "--migration-limit", "3")
OFTEN = {"HOLDFAST_WORKER_UPSTREAM_IDENTITY_S": "0.2", "HOLDFAST_FRONTEND__REROUTE_S": "2"}
PROMPT = [300 + 13 * k for k in range(20)]
TOKENS = 80

pytestmark = pytest.mark.slow


@dataclass
class World:
    """A fleet in front of three servers, and the undisturbed answer of each adapter."""

    fleet: LocalFleet
    servers: list[Upstream]

    async def served(self) -> set[str]:
        async with client(self.fleet) as api:
            return {model.id async for model in api.models.list()}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(BUILTIN_FILE, folder / "tokenizer.json")
    adapters = (("sql",), (), ())
    servers = [await Upstream(token_s=0.01, adapters=names).start() for names in adapters]
    file = folder / "up.yaml"
    file.write_text(
        "upstreams:\n" + "".join(f"  - {{name: g{n}, url: '{servers[n].url}'}}\n" for n in range(3))
    )
    flags = (*FLAGS, "--model", str(folder), "--upstreams", str(file))
    async with running(folder / "fleet", *flags, environment=OFTEN) as fleet:
        await fleet.healthy(3)
        yield World(fleet, servers)
    for server in servers:
        await server.stop()


async def text(world: World, model: str, pieces: list[str] | None = None) -> str:
    """Return a streamed answer. Each piece is also added to `pieces`."""
    found = [] if pieces is None else pieces
    async with client(world.fleet) as api:
        stream = await api.completions.create(
            model=model, prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )  # fmt: skip
        async for chunk in stream:
            found += [choice.text for choice in chunk.choices]
    return "".join(found)


async def not_found(world: World, model: str) -> Any:
    async with client(world.fleet) as api:
        with pytest.raises(openai.NotFoundError) as raised:
            await api.completions.create(model=model, prompt=PROMPT, max_tokens=1)
    return raised.value.code


async def test_adapters_are_loaded_and_unloaded_while_the_fleet_serves(world: World) -> None:
    assert await world.served() == {"up", "sql"}
    before = await world.fleet.status()
    sql, base = await text(world, "sql"), await text(world, "up")
    assert sql != base
    assert await not_found(world, "legal") == "model_not_found"
    world.servers[2].adapters = ("legal",)
    await until(lambda: loaded(world, {"up", "sql", "legal"}), 30)
    assert await text(world, "legal") not in (sql, base)
    world.servers[2].adapters = ()
    await until(lambda: loaded(world, {"up", "sql"}), 30)
    assert await not_found(world, "legal") == "model_not_found"
    after = await world.fleet.status()
    assert [w["instance"] for w in after["workers"]] == [w["instance"] for w in before["workers"]]


async def loaded(world: World, names: set[str]) -> bool:
    return await world.served() == names


async def test_a_stream_that_loses_its_server_continues_only_with_its_adapter(world: World) -> None:
    first, other, plain = world.servers
    expected = await text(world, "sql")
    other.adapters = ("sql",)
    await until(lambda: of_worker(world, "g1", ["sql"]), 30)
    plain.bodies.clear()
    pieces: list[str] = []
    answer = asyncio.ensure_future(text(world, "sql", pieces))
    await until(lambda: len(pieces) > 5)
    serving = first if first.streaming else other
    await serving.stop()
    assert await answer == expected
    assert [body for body in plain.bodies if body["model"] == "sql"] == []
    last = other if serving is first else first
    pieces.clear()
    answer = asyncio.ensure_future(text(world, "sql", pieces))
    await until(lambda: len(pieces) > 5)
    await last.stop()
    with pytest.raises(openai.APIError) as raised:
        await answer
    assert raised.value.code == "upstream_lost"
    assert [body for body in plain.bodies if body["model"] == "sql"] == []


async def of_worker(world: World, worker: str, adapters: list[str]) -> bool:
    """Return whether the fleet knows these adapters of a worker."""
    [found] = [one for one in (await world.fleet.status())["workers"] if one["id"] == worker]
    return bool(found["adapters"] == adapters)
