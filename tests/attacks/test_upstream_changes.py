"""A fleet in front of servers that change models or rotate keys needs no restart and fails no request."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from fleet import client, running
from upstream import Upstream
from waits import until

from benchmarks.local_fleet import LocalFleet
from events.token_bytes import BUILTIN_FILE

OLD, NEW = "sk-old", "sk-new"
IN_TIME_S = 40

pytestmark = [pytest.mark.attack, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class World:
    """A fleet of two workers, one in front of each server."""

    fleet: LocalFleet
    servers: tuple[Upstream, Upstream]
    key: Path


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("changing")
    (folder / "model").mkdir()
    shutil.copy(BUILTIN_FILE, folder / "model" / "tokenizer.json")
    (key := folder / "key").write_text(OLD)
    servers = await Upstream(key=OLD).start(), await Upstream(key=OLD).start()
    urls = [flag for server in servers for flag in ("--upstream", server.url)]
    flags = (
        "--engine",
        "openai",
        "--canary-interval",
        "1",
        "--breaker-wait",
        "1",
        "--upstream-key-file",
        str(key),
    )
    async with running(folder / "fleet", *flags, "--model", str(folder / "model"), *urls) as fleet:
        await fleet.healthy(2)
        yield World(fleet, servers, key)
    for server in servers:
        await server.stop()


async def status(fleet: LocalFleet, model: str) -> int:
    """Return the status of one request for a model."""
    async with client(fleet) as api:
        prompt = list(range(300, 320))
        answer = await api.completions.with_raw_response.create(model=model, prompt=prompt, max_tokens=4)
        return answer.status_code


async def becomes(fleet: LocalFleet, model: str, wanted: int) -> None:
    """Send requests until those for a model have this status."""

    async def became() -> bool:
        try:
            return await status(fleet, model) == wanted
        except Exception as error:
            return getattr(error, "status_code", None) == wanted

    await until(became, IN_TIME_S, f"{model}: {wanted}", every_s=0.2)


async def test_a_rotated_key_is_used_without_a_restart(world: World) -> None:
    """Both servers require another key from the moment at which the file has it: no request fails."""
    lives = [worker["instance"] for worker in (await world.fleet.healthy(2))["workers"]]
    world.key.write_text(NEW)
    for server in world.servers:
        server.key = NEW
    for _ in range(10):
        assert await status(world.fleet, "up") == 200
    assert [worker["instance"] for worker in (await world.fleet.healthy(2))["workers"]] == lives


async def refused(fleet: LocalFleet, **more: Any) -> tuple[int, str, str]:
    """Return status, code and Retry-After of one request that must be refused."""
    async with client(fleet) as api:
        with pytest.raises(openai.APIStatusError) as raised:
            await api.completions.create(model="up", prompt=list(range(300, 320)), max_tokens=4, **more)
        response = raised.value.response
        return response.status_code, response.json()["error"]["code"], response.headers["Retry-After"]


async def test_servers_that_send_retry_after_get_one_request(world: World) -> None:
    """A request makes at most one attempt at each server, later ones none, and no worker loses its health."""
    times = ("14", "12")  # longer than the queue waits
    for server, seconds in zip(world.servers, times, strict=True):
        server.bodies.clear()
        server.fault, server.retry_after = "http_429", seconds
    try:
        for _ in range(5):
            status, code, retry_after = await refused(world.fleet)
            assert (status, code) == (503, "upstream_overloaded") and 1 <= int(retry_after) <= 12
        for server in world.servers:
            # identified by their prompt: an unmarked canary may arrive meanwhile
            assert sum(body.get("prompt", [])[:2] == [300, 301] for body in server.bodies) <= 1
    finally:
        for server in world.servers:
            server.fault = server.retry_after = ""
    await becomes(world.fleet, "up", 200)
    workers = (await world.fleet.healthy(2))["workers"]
    assert all(worker["weight"] == 1 for worker in workers)


@pytest.mark.parametrize("more", [{"n": 2}, {"extra_body": {"guided_choice": ["yes", "no"]}}])
async def test_any_request_is_retried_before_its_first_token(world: World, more: dict[str, Any]) -> None:
    """One server breaks each connection before a token: the other one answers, also n > 1 and constrained requests."""
    first, _ = world.servers
    for server in world.servers:
        server.obeys = frozenset(("guided",))
    first.fault, first.after = "cut", 0
    try:
        async with client(world.fleet) as api:
            prompt = list(range(300, 320))
            for _ in range(4):
                answer = await api.completions.create(model="up", prompt=prompt, max_tokens=4, **more)
                assert all(choice.finish_reason == "length" for choice in answer.choices)
    finally:
        first.fault, first.after = "", 3
    await world.fleet.healthy(2)  # the broken connections may have opened its breaker


async def test_a_server_with_another_model_is_served_under_its_new_name(world: World) -> None:
    """The old name is served by the other server alone, without an error; the new name works within seconds."""
    first, _ = world.servers
    first.model = "other"
    try:
        for _ in range(20):
            assert await status(world.fleet, "up") == 200
        await becomes(world.fleet, "other", 200)
        assert await status(world.fleet, "up") == 200
        workers = (await world.fleet.healthy(2))["workers"]
        assert {worker["model"] for worker in workers} == {"up", "other"}
    finally:
        first.model = "up"
    await world.fleet.until(lambda s: {worker["model"] for worker in s["workers"]} == {"up"})
    await world.fleet.healthy(2)
