"""A fleet in front of three embedding servers: users do not notice a wrong or a broken one."""

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from fleet import client, running
from upstream import OtherPath, Upstream

from benchmarks.local_fleet import LocalFleet
from events.token_bytes import BUILTIN_FILE

FLAGS = ("--engine", "openai", "--canary-interval", "0.2", "--breaker-wait", "0.3", "--breaker-backoff", "1")
SIZE = 256

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


def embedding(text: str) -> list[float]:
    """Return the right embedding of a text."""
    dice = random.Random(text)
    return [dice.gauss(0, 1) for _ in range(SIZE)]


@dataclass
class EmbeddingServer(Upstream):
    """A server with embeddings only."""

    generates: bool = False
    others: dict[str, OtherPath] = field(default_factory=lambda: {"/v1/embeddings": OtherPath([])})
    wrong: bool = False  # ten numbers of each embedding are zero
    broken: bool = False  # its connections break before an answer

    async def _other(self, request: web.Request) -> web.StreamResponse:
        if self.broken and request.transport is not None:
            request.transport.abort()
        body = await request.json()
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        vectors = [embedding(text) for text in texts]
        for vector in vectors if self.wrong else ():
            vector[10:20] = [0.0] * 10
        data = [
            {"object": "embedding", "index": place, "embedding": one} for place, one in enumerate(vectors)
        ]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return web.json_response({"object": "list", "model": body["model"], "data": data, "usage": usage})


@dataclass
class World:
    """A fleet of three workers, one in front of each server."""

    fleet: LocalFleet
    servers: tuple[EmbeddingServer, ...]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("pooling")
    (folder / "model").mkdir()
    shutil.copy(BUILTIN_FILE, folder / "model" / "tokenizer.json")
    servers = tuple([EmbeddingServer() for _ in range(3)])
    for server in servers:
        await server.start()
    urls = [flag for server in servers for flag in ("--upstream", server.url)]
    async with running(folder / "fleet", *FLAGS, "--model", str(folder / "model"), *urls) as fleet:
        yield World(fleet, servers)
    for server in servers:
        await server.stop()


async def check_embeddings(fleet: LocalFleet, count: int = 12) -> None:
    """Check that users get right embeddings through the official client."""

    async def one(number: int) -> None:
        texts = [f"text {number}", f"another {number}"]
        async with client(fleet) as api:
            found = await api.embeddings.create(model="up", input=texts, encoding_format="float")
        assert [item.embedding for item in found.data] == [embedding(text) for text in texts]

    await asyncio.gather(*(one(number) for number in range(count)))


async def test_a_server_with_wrong_embeddings_is_convicted(world: World) -> None:
    await world.fleet.healthy(3)
    await check_embeddings(world.fleet)
    sick = world.servers[1]
    sick.wrong = True
    try:
        found = await world.fleet.until(lambda s: any(w["weight"] == 0 for w in s["workers"]))
        assert [w["weight"] > 0 for w in found["workers"]] == [True, False, True]
        await check_embeddings(world.fleet)
    finally:
        sick.wrong = False
    await world.fleet.healthy(3)  # acquitted


async def test_no_request_is_lost_when_a_server_breaks(world: World) -> None:
    await world.fleet.healthy(3)
    sick = world.servers[2]
    sick.broken = True
    try:
        await check_embeddings(world.fleet, 30)
    finally:
        sick.broken = False
    await world.fleet.healthy(3)


async def test_the_model_has_no_chats(world: World) -> None:
    body: dict[str, Any] = {"model": "up", "messages": [{"role": "user", "content": "hi"}]}
    async with client(world.fleet) as api:
        response = await api._client.post("/chat/completions", json=body)
    assert response.status_code == 404
    assert json.loads(response.content)["error"]["message"] == "no server of up offers /v1/chat/completions"
