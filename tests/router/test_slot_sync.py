"""Frontends count each other's requests through a real broker, also after an outage of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.feeds.slot_sync import SlotSync
from controller.router.endpoints import WorkerRank
from controller.router.load.active_sequences import ActiveSequences, RankWork
from events import subjects
from events.nats.connection import BrokerConnection

Eventually = Callable[..., Awaitable[None]]
W1 = WorkerRank("w1", "i1")


@asynccontextmanager
async def frontend(url: str, name: str) -> AsyncIterator[tuple[ActiveSequences, SlotSync]]:
    slots = ActiveSequences()
    sync = await SlotSync.open(url, name, slots)
    task = asyncio.create_task(sync.run())
    yield slots, sync
    task.cancel()
    await asyncio.wait({task})
    await sync.close()


def now() -> float:
    return asyncio.get_running_loop().time()


def at_w1(slots: ActiveSequences) -> RankWork:
    return slots.work(W1, now=now())


async def test_all_frontends_count_all_requests_also_after_a_broker_outage(
    own_nats: EmbeddedServer, eventually: Eventually
) -> None:
    async with frontend(own_nats.url, "a") as (a, sync_a), frontend(own_nats.url, "b") as (b, sync_b):
        for number in range(1000):
            a.add(number, W1, [number, number + 5000], now=now(), prefill_tokens=10)
        for number in range(500):
            a.prefill_done(number, now=now())
        b.add("mine", W1, [0], now=now())
        whole = RankWork(5000, 2000, 1001)
        await eventually(lambda: at_w1(a) == at_w1(b) == whole)
        assert sync_b.replicas.gaps == 0
        async with frontend(own_nats.url, "c") as (c, _):  # starts later
            await eventually(lambda: at_w1(c) == whole)

        await own_nats.kill()
        await eventually(lambda: not sync_a.connected and not sync_b.connected)
        for number in range(990):
            a.free(number, now=now())
        assert at_w1(b) == whole  # as it was
        server = await start_nats(own_nats.directory, port=own_nats.port)
        await eventually(lambda: at_w1(a) == at_w1(b) == RankWork(100, 21, 11))
        a.free(999, now=now())
        await eventually(lambda: at_w1(b).requests == 10)
        await server.kill()


async def test_invalid_messages_are_counted_and_change_nothing(
    own_nats: EmbeddedServer, eventually: Eventually
) -> None:
    async with frontend(own_nats.url, "a") as (a, _), frontend(own_nats.url, "b") as (b, sync):
        other = await BrokerConnection.open(own_nats.url, "other")
        await other.client.publish(subjects.KV_SLOTS, b"nonsense")
        await eventually(lambda: sync.bad == 1)
        a.add(1, W1, [1], now=now())
        await eventually(lambda: at_w1(b) == RankWork(0, 1, 1))
        await other.close()
