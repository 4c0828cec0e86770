"""An upstream's KV events reach a frontend's index: over ZeroMQ to the worker, then a real broker."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from engine_contract import asked
from memory_journal import MemoryJournal, MemoryStream
from upstream import Upstream
from vllm_events import Publisher, cleared, removed, stored

from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.feeds.kv_events import KvEvents
from controller.router.endpoints import WorkerRank
from events import blocks
from events.nats.connection import BrokerConnection
from events.observations import WorkerJoined
from workers.config.settings import WorkerConfig
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings
from workers.kv_events.publisher import KvPublisher
from workers.worker import InferenceWorker

Eventually = Callable[..., Awaitable[None]]
SIZE = 8
HOLDER = WorkerRank("w0", "i1", 0)


def names_of(tokens: list[int]) -> list[int]:
    return blocks.sequence_hashes(blocks.local_hashes(tokens, SIZE))


class Cache:
    """The upstream's prefix cache; its publisher uses its own block names."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.held: dict[int, int] = {}  # Holdfast's names, by its own
        self.copies: Counter[int] = Counter()  # per block: what is behind a hole is computed again

    def store(self, tokens: list[int], salt: str = "") -> None:
        """Store the new whole blocks of a prompt."""
        whole = tokens[: len(tokens) // SIZE * SIZE]
        own = blocks.sequence_hashes(blocks.local_hashes(whole, SIZE, blocks.seed(namespace=f"own {salt}")))
        known = 0
        while known < len(own) and own[known] in self.held:
            known += 1
        if known == len(own):
            return
        if not salt:
            self.held.update(zip(own, names_of(whole), strict=True))
            self.copies.update(own[known:])
        extras = [[salt] if salt and not known else None, *[None] * (len(own) - known - 1)]
        parent = own[known - 1] if known else None
        self.publisher.publish(
            stored(own[known:], whole[known * SIZE :], SIZE, parent=parent, extra_keys=extras)
        )

    def evict(self, random: random.Random) -> None:
        """Evict a copy of some blocks."""
        gone = random.sample(sorted(self.held), min(len(self.held), 3))
        for own in gone:
            self.copies[own] -= 1
            if not self.copies[own]:
                del self.held[own]
        self.publisher.publish(removed(gone))

    def forget(self) -> None:
        """Restart."""
        self.held.clear()
        self.copies.clear()

    def empty(self) -> None:
        """Evict all blocks."""
        self.forget()
        self.publisher.publish(cleared())


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    server = await Upstream().start()
    yield server
    await server.stop()


@pytest.fixture
async def cache(upstream: Upstream) -> AsyncIterator[Cache]:
    publisher = Publisher()
    cache = Cache(publisher)
    upstream.stored = lambda tokens, salt: cache.store(tokens, salt)
    yield cache
    publisher.close()


@asynccontextmanager
async def served(
    upstream: Upstream, publisher: Publisher, url: str
) -> AsyncIterator[tuple[OpenAIEngine, KvEvents]]:
    """A worker in front of the upstream, and a frontend that follows it."""
    engine = OpenAIEngine(
        UpstreamSettings(
            url=upstream.url, kv_events=[publisher.endpoint], kv_replays=[publisher.replay_endpoint]
        )
    )
    connection = await BrokerConnection.open(url, "worker:w0")
    stream, stop = MemoryStream(), asyncio.Event()
    kv = KvPublisher("w0", "i1", connection)
    worker = InferenceWorker(
        WorkerConfig(name="w0", instance="i1"), engine, MemoryJournal(stream, "worker:w0"), None, kv=kv
    )
    life = asyncio.ensure_future(worker.run(stop))
    frontend = await KvEvents.open(url, "frontend")
    service = asyncio.ensure_future(frontend.run())
    try:
        await worker.serving.wait()
        (joined,) = [event.fact for event in stream.events if isinstance(event.fact, WorkerJoined)]
        assert joined.kv_events and joined.profile.block_tokens == SIZE
        frontend.absorb([joined])
        yield engine, frontend
    finally:
        service.cancel()
        stop.set()
        await asyncio.wait((service, life), timeout=20)
        await frontend.close()
        await connection.close()
    assert life.result() == 0


def prompts(seed: int) -> list[list[int]]:
    """Return prompts with shared prefixes."""
    dice = random.Random(seed)
    stems = [[dice.randrange(300, 1800) for _ in range(4 * SIZE)] for _ in range(3)]
    return [
        dice.choice(stems)[: dice.randrange(1, 4) * SIZE]
        + [dice.randrange(300, 1800) for _ in range(3 * SIZE)]
        for _ in range(12)
    ]


def depth(names: list[int], there: set[int]) -> int:
    """Return how many of these blocks, from the first on, are present."""
    return next((place for place, name in enumerate(names) if name not in there), len(names))


@pytest.mark.servers
async def test_a_frontend_knows_what_the_server_behind_a_worker_has_cached(
    upstream: Upstream, cache: Cache, nats_server: EmbeddedServer, eventually: Eventually
) -> None:
    publisher, dice = cache.publisher, random.Random(7)
    async with served(upstream, publisher, nats_server.url) as (engine, frontend):

        def same() -> bool:
            there = set(cache.held.values())
            return frontend.view.index.count(HOLDER) == len(there) and all(
                frontend.view.index.find(names).device.get(HOLDER, 0) == depth(names, there)
                for names in map(names_of, prompts(1))
            )

        for key, tokens in enumerate(prompts(1)):
            engine.submit(key, asked(key, tokens, max_tokens=2))
        engine.submit(99, asked(99, prompts(2)[0], max_tokens=2, canary=True))
        await eventually(lambda: len(upstream.bodies) == 13)
        await eventually(same)
        cache.evict(dice)
        await eventually(same)
        publisher.lose = True  # three batches that only the replay has
        cache.evict(dice)
        cache.store(prompts(1)[0])
        cache.evict(dice)
        publisher.lose = False
        cache.store(prompts(3)[0])  # the first one received again
        await eventually(same)
        cache.empty()
        await eventually(same)
        cache.store(prompts(1)[2])
        await eventually(same)
        publisher.restart()
        cache.forget()
        publisher.drop_listeners()
        await eventually(same)
        for tokens in prompts(1):
            cache.store(tokens)
        await eventually(same)
        assert engine.kv_event_counts["lost"] == 1
