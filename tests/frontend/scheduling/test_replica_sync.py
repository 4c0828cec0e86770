"""Frontends with `--router-replica-sync` route like one: each counts the others' requests too."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from frontend_kit import Kit, frontend
from scripted_worker import ScriptedWorker
from waits import until

from controller.adapters.embedded.server import EmbeddedServer
from controller.processes.frontend import RouterFeeds

PROMPT = list(range(300, 300 + 64))  # four blocks


@asynccontextmanager
async def in_step(kit: Kit, url: str, name: str) -> AsyncIterator[None]:
    """Connect a frontend to the others' reports."""
    feeds = await RouterFeeds.open(url, name, kit.director.settings.router, kit.director)
    services = [asyncio.ensure_future(service()) for service in feeds.services()]
    yield
    for service in services:
        service.cancel()
    await asyncio.wait(services)
    await feeds.close()


async def test_a_request_of_one_frontend_counts_at_the_other_until_it_ends(own_nats: EmbeddedServer) -> None:
    one, two = ScriptedWorker("w1", step_s=0.05), ScriptedWorker("w2", step_s=0.05)
    router = {"replica_sync": True, "kv_events": False}
    async with (
        frontend(one, two, router=router) as a,
        frontend(one, two, router=router) as b,
        in_step(a, own_nats.url, "a"),
        in_step(b, own_nats.url, "b"),
    ):
        slots = b.director.routing.slots
        asked = asyncio.create_task(a.complete(PROMPT, 10))
        await until(lambda: len(slots) == 1)
        assert [len(one.requests), len(two.requests)] == [1, 0]
        await b.complete(PROMPT, 1)
        assert [len(one.requests), len(two.requests)] == [1, 1], "the first worker is already busy"
        await asked
        await until(lambda: len(slots) == 0)
