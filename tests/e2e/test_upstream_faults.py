"""A fleet in front of external servers: whatever one of them does wrong, every stream stays complete.

The servers are the tests' own, modelled on vLLM; the real ones are tested on request (`docs/guides/engines.md`).
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from fleet import client, holdfast, running
from upstream import Upstream

from benchmarks.local_fleet import LocalFleet
from events.token_bytes import BUILTIN_FILE
from workers.engines.openai.kv_names import CANARY_SALT, EPOCH_SALT, read_salt

FLAGS = (
    "--engine",
    "openai",
    "--canary-interval",
    "0.2",
    "--breaker-wait",
    "0.3",
    "--breaker-backoff",
    "1",
)
TOKENS = 40
STREAMS = 4
FAULTS = ("zeros", "abort", "error_then_done", "no_finish", "cut", "http_400")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class World:
    """A fleet of two workers, one in front of each server."""

    fleet: LocalFleet
    servers: tuple[Upstream, Upstream]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("upstreams")
    (folder / "model").mkdir()
    shutil.copy(BUILTIN_FILE, folder / "model" / "tokenizer.json")
    servers = await Upstream(token_s=0.005).start(), await Upstream(token_s=0.005).start()
    urls = [flag for server in servers for flag in ("--upstream", server.url)]
    async with running(folder / "fleet", *FLAGS, "--model", str(folder / "model"), *urls) as fleet:
        yield World(fleet, servers)
    for server in servers:
        await server.stop()


async def text(fleet: LocalFleet, number: int) -> str:
    """Return one streamed answer, complete."""
    async with client(fleet) as api:
        prompt = [300 + (7 * number + 13 * k) % 1500 for k in range(20)]
        stream = await api.completions.create(
            model="up",
            prompt=prompt,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        pieces = [chunk.choices[0] async for chunk in stream if chunk.choices]
        assert pieces[-1].finish_reason == "length"
        return "".join(piece.text for piece in pieces)


async def answers(fleet: LocalFleet) -> list[str]:
    return list(await asyncio.gather(*(text(fleet, number) for number in range(STREAMS))))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
async def test_no_user_notices(world: World, fault: str) -> None:
    await world.fleet.healthy(2)
    expected = await answers(world.fleet)
    sick = world.servers[0]
    sick.fault, sick.after = fault, 5
    try:
        if fault != "http_400":  # for a user it may be a client error; for a canary it never is
            assert await answers(world.fleet) == expected
        await world.fleet.until(lambda s: any(w["weight"] == 0 for w in s["workers"]))
        assert await answers(world.fleet) == expected
    finally:
        sick.fault = ""


@pytest.mark.slow
async def test_the_next_life_of_a_worker_uses_no_server_cache_from_before_the_conviction(
    world: World,
) -> None:
    before = (await world.fleet.healthy(2))["workers"]
    sick, well = world.servers
    sick.fault = "zeros"
    try:
        await world.fleet.until(lambda s: s["workers"][0]["weight"] == 0)
    finally:
        sick.fault = ""
    await world.fleet.healthy(2)  # acquitted
    await asyncio.to_thread(holdfast, "restart", "w0", "--data", str(world.fleet.data))
    await world.fleet.until(lambda s: s["workers"][0]["instance"] != before[0]["instance"])
    await world.fleet.healthy(2)
    for server in world.servers:
        server.bodies.clear()
    await answers(world.fleet)
    asked = [[b.get("cache_salt", "") for b in s.bodies if b["max_tokens"] == TOKENS] for s in (sick, well)]
    salts = [{salt for salt in each if not salt.startswith(CANARY_SALT)} for each in asked]
    (salt,), plain = salts
    assert salt.startswith(EPOCH_SALT) and read_salt(salt)[0] > 0 and read_salt(salt)[1] == ""
    assert plain == {""}
