"""A worker with a prefix cache publishes its KV events, and frontends can follow them.

`tests/router/test_kv_following.py` tests the same over a lossy connection.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from memory_journal import MemoryJournal, MemoryStream
from waits import turns

from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.feeds.kv_events import KvEvents
from controller.router.endpoints import WorkerRank
from events.blocks import local_hashes, sequence_hashes
from events.kv import KvRequest, Removed, Stored, Tier
from events.nats.connection import BrokerConnection
from events.nats.overrides import FastClient
from events.observations import WorkerJoined
from events.wire import Chunk, Generate, Sampling
from workers.config.settings import WorkerConfig
from workers.engines.engine import Announce, Deliver, discard_events
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.kv_events.ledger import LedgerBounds
from workers.kv_events.publisher import KvPublisher
from workers.worker import InferenceWorker

Eventually = Callable[..., Awaitable[None]]


class Announcing(SimulatedEngine):
    """Announces the events and output that the test defines."""

    def __init__(self, announces: bool) -> None:
        super().__init__(EngineShape())
        self.announces = announces
        self.announce: Announce = discard_events

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        await super().start(deliver)
        self.announce = announce


class Overheard(SimulatedEngine):
    """An engine with recorded output that goes nowhere else."""

    def __init__(self) -> None:
        super().__init__(EngineShape())
        self.output: dict[int, Chunk] = {}

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        await super().start(self.output.update, announce)


@pytest.fixture
async def connection(nats_server: EmbeddedServer) -> AsyncIterator[BrokerConnection]:
    """A worker process's connection to the broker."""
    made = await BrokerConnection.open(nats_server.url, "worker:w0")
    yield made
    await made.close()


@asynccontextmanager
async def running(
    engine: SimulatedEngine, connection: BrokerConnection
) -> AsyncIterator[tuple[InferenceWorker, WorkerJoined]]:
    """A worker that serves, and its registration."""
    stream, stop = MemoryStream(), asyncio.Event()
    publisher = KvPublisher("w0", "i1", connection)
    worker = InferenceWorker(
        WorkerConfig(name="w0", instance="i1"), engine, MemoryJournal(stream, "worker:w0"), None, kv=publisher
    )
    life = asyncio.ensure_future(worker.run(stop))
    try:
        await worker.serving.wait()
        (joined,) = [event.fact for event in stream.events if isinstance(event.fact, WorkerJoined)]
        yield worker, joined
    finally:
        stop.set()
        await asyncio.wait((life,), timeout=20)
    assert life.result() == 0


@asynccontextmanager
async def following(url: str, joined: WorkerJoined) -> AsyncIterator[KvEvents]:
    """A frontend that follows a worker's KV events."""
    frontend = await KvEvents.open(url, "frontend")
    service = asyncio.ensure_future(frontend.run())
    try:
        frontend.absorb([joined])
        yield frontend
    finally:
        service.cancel()
        await asyncio.wait((service,), timeout=20)
        await frontend.close()


async def test_frontends_follow_a_worker_from_its_registration_to_its_end(
    nats_server: EmbeddedServer, connection: BrokerConnection, eventually: Eventually
) -> None:
    engine, holder = Announcing(True), WorkerRank("w0", "i1", 0)
    async with running(engine, connection) as (worker, joined):
        assert joined.kv_events
        engine.announce(0, [Stored([1, 2, 3])])
        async with following(nats_server.url, joined) as frontend:
            await eventually(lambda: frontend.view.index.find([1, 2, 3]).device == {holder: 3})
            engine.announce(0, [Removed([3]), Stored([4], 2, Tier.HOST)])
            await eventually(lambda: frontend.view.index.find([1, 2, 4]).host == {holder: 3})
            assert frontend.view.index.find([1, 2, 3]).device == {holder: 2}
        assert worker.kv is not None and (worker.kv.published, worker.kv.dropped, worker.kv.blocks) == (
            3,
            0,
            3,
        )
    engine.announce(0, [Stored([9])])
    assert worker.kv.blocks == 3  # its events are not published any more


async def test_blocks_of_a_convicted_worker_are_never_used_even_after_the_conviction_was_lifted(
    nats_server: EmbeddedServer, connection: BrokerConnection, eventually: Eventually
) -> None:
    engine, prompt = Overheard(), list(range(100, 164))
    names, holder = (
        sequence_hashes(local_hashes(prompt, engine.shape.block_tokens)),
        WorkerRank("w0", "i1", 0),
    )
    output = engine.output
    async with (
        running(engine, connection) as (worker, joined),
        following(nats_server.url, joined) as frontend,
    ):
        convicted = worker.commands.on_distrust

        async def found(key: int) -> int:
            """Return how many prompt tokens the engine has cached, once a frontend knows the whole prompt."""
            engine.submit(key, Generate(key, f"r{key}", prompt, len(prompt), Sampling(max_tokens=1)))
            await eventually(lambda: key in output)
            return output[key].cached_tokens or 0

        assert await found(1) == 0
        await eventually(lambda: frontend.view.index.find(names).device == {holder: len(names)})
        assert await found(2) == 63
        assert convicted({"instance": "i1", "reason": "corrupt"}) == {"convicted": True}
        await eventually(lambda: not frontend.view.index.find(names).device)
        assert [await found(3), await found(4)] == [0, 0]  # an answer that ends later leaves nothing either
        assert convicted({"instance": "i1", "reason": "corrupt"}) == {"convicted": True}
        assert convicted({"instance": "i1", "reason": ""}) == {"convicted": False}
        assert await found(5) == 0
        await eventually(lambda: frontend.view.index.find(names).device == {holder: len(names)})
        assert convicted({"instance": "i1", "reason": ""}) == {"convicted": False}  # the command was repeated
        assert await found(6) == 63
        assert frontend.view.index.find(names).device == {holder: len(names)}
        assert worker.kv is not None and not any(one.refused for one in worker.kv.ledgers.values())


async def test_a_worker_without_kv_events_registers_none(connection: BrokerConnection) -> None:
    async with running(Announcing(False), connection) as (worker, joined):
        assert not joined.kv_events and worker.kv is None


async def test_events_of_many_workers_in_one_turn_of_the_loop_are_one_write(
    connection: BrokerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, written = connection.client, list[int]()

    def write() -> None:
        written.append(client.unsent())
        FastClient.write(client)

    monkeypatch.setattr(client, "write", write)
    publishers = [KvPublisher(f"w{number}", "i1", connection) for number in range(20)]
    for publisher in publishers:
        publisher.start(1)
    await turns(10)
    assert len([size for size in written if size]) == 1
    for publisher in publishers:
        await publisher.close()


async def test_a_dump_that_is_no_longer_fetched_is_dropped(
    connection: BrokerConnection,
) -> None:
    publisher = KvPublisher("w0", "i1", connection, LedgerBounds(part_blocks=2, dump_s=-1.0))
    publisher.announce(0, [Stored([1, 2, 3])])
    publisher.answer(KvRequest())
    assert sum(len(ledger.snapshots) for ledger in publisher.ledgers.values()) == 1
    publisher.start(1)  # publishes its next event id, now and every few seconds
    assert sum(len(ledger.snapshots) for ledger in publisher.ledgers.values()) == 0
    await publisher.close()
