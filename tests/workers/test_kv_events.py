"""A worker whose engine announces its prefix cache tells the fleet so, and of every block. Over a wire that breaks things it
is tested in `tests/router/test_kv_following.py`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from controller.adapters.embedded import Server
from controller.adapters.kv_events import KvEvents
from controller.router.table import Holder
from events.blocks import local_hashes, sequence_hashes
from events.connection import Connection, FastClient
from events.journal.memory import MemoryJournal, MemoryStream
from events.kv import Ask, Removed, Stored, Tier
from events.observations import WorkerJoined
from events.wire import Chunk, Generate, Sampling
from workers import kv_ledger
from workers.engines.engine import Announce, Deliver, unheard
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import Shape
from workers.kv_events import KvPublisher
from workers.obedience import Place
from workers.worker import Worker

Eventually = Callable[..., Awaitable[None]]


class Announcing(SimulatedEngine):
    """Says what the test wants it to say."""

    def __init__(self, announces: bool) -> None:
        super().__init__(Shape())
        self.announces = announces
        self.announce: Announce = unheard

    async def start(self, deliver: Deliver, announce: Announce = unheard) -> None:
        await super().start(deliver)
        self.announce = announce


@pytest.fixture
async def connection(nats_server: Server) -> AsyncIterator[Connection]:
    """A worker process's connection to the broker."""
    made = await Connection.open(nats_server.url, "worker:w0")
    yield made
    await made.close()


@asynccontextmanager
async def running(
    engine: SimulatedEngine, connection: Connection
) -> AsyncIterator[tuple[Worker, WorkerJoined]]:
    """A worker that serves, and its registration."""
    stream, stop = MemoryStream(), asyncio.Event()
    publisher = KvPublisher("w0", "i1", connection)
    worker = Worker(
        Place(name="w0", instance="i1"), engine, MemoryJournal(stream, "worker:w0"), None, kv=publisher
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
    """A frontend that follows it."""
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
    nats_server: Server, connection: Connection, eventually: Eventually
) -> None:
    engine, holder = Announcing(True), Holder("w0", "i1", 0)
    async with running(engine, connection) as (worker, joined):
        assert joined.kv_events
        engine.announce(0, [Stored([1, 2, 3])])
        async with following(nats_server.url, joined) as frontend:
            await eventually(lambda: frontend.index.find([1, 2, 3]).device == {holder: 3})
            engine.announce(0, [Removed([3]), Stored([4], 2, Tier.HOST)])
            await eventually(lambda: frontend.index.find([1, 2, 4]).host == {holder: 3})
            assert frontend.index.find([1, 2, 3]).device == {holder: 2}
        assert worker.kv is not None and (worker.kv.said, worker.kv.dropped, worker.kv.blocks) == (3, 0, 3)
    engine.announce(0, [Stored([9])])
    assert worker.kv.blocks == 3  # nobody is told any more


async def test_what_a_convicted_worker_has_computed_is_used_by_nobody_even_after_it_was_taken_back(
    nats_server: Server, connection: Connection, eventually: Eventually
) -> None:
    engine, prompt = SimulatedEngine(Shape()), list(range(100, 164))
    names, holder = sequence_hashes(local_hashes(prompt, engine.shape.block_tokens)), Holder("w0", "i1", 0)
    said: dict[int, Chunk] = {}
    async with (
        running(engine, connection) as (worker, joined),
        following(nats_server.url, joined) as frontend,
    ):
        convicted = partial(worker.obedience.on_distrust, "")

        async def found(key: int) -> int:
            """Return how much of the prompt the engine has, once a frontend knows all of it."""
            engine.submit(key, Generate(key, f"r{key}", prompt, len(prompt), Sampling(max_tokens=1)))
            await eventually(lambda: key in said)
            return said[key].cached_tokens or 0

        engine.each[0]._deliver = lambda out: said.update(out)
        assert await found(1) == 0
        await eventually(lambda: frontend.index.find(names).device == {holder: len(names)})
        assert await found(2) == 63
        assert convicted({"instance": "i1", "reason": "corrupt"}) == {"convicted": True}
        await eventually(lambda: not frontend.index.find(names).device)
        assert [await found(3), await found(4)] == [0, 0]  # who comes too late leaves nothing either
        assert convicted({"instance": "i1", "reason": "corrupt"}) == {"convicted": True}
        assert convicted({"instance": "i1", "reason": ""}) == {"convicted": False}
        assert await found(5) == 0
        await eventually(lambda: frontend.index.find(names).device == {holder: len(names)})
        assert convicted({"instance": "i1", "reason": ""}) == {"convicted": False}  # said twice
        assert await found(6) == 63
        assert frontend.index.find(names).device == {holder: len(names)}
        assert worker.kv is not None and worker.kv.refused == 0


async def test_a_worker_whose_engine_announces_nothing_promises_nothing(connection: Connection) -> None:
    async with running(Announcing(False), connection) as (worker, joined):
        assert not joined.kv_events and worker.kv is None


async def test_what_many_say_in_one_turn_of_the_loop_is_one_write(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, written = connection.client, list[int]()

    def write() -> None:
        written.append(client._pending_data_size)
        FastClient.write(client)

    monkeypatch.setattr(client, "write", write)
    publishers = [KvPublisher(f"w{number}", "i1", connection) for number in range(20)]
    for publisher in publishers:
        publisher.start(1)
    await asyncio.sleep(0.01)
    assert len([size for size in written if size]) == 1
    for publisher in publishers:
        await publisher.close()


async def test_a_dump_that_nobody_asks_for_any_more_is_dropped(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = KvPublisher("w0", "i1", connection)
    publisher.announce(0, [Stored(list(range(1, 2 * kv_ledger.PART_BLOCKS)))])
    publisher._answer(Ask())
    ledger = publisher._ledgers[0]
    assert ledger._snapshots
    monkeypatch.setattr(kv_ledger, "DUMP_S", -1.0)
    publisher.start(1)  # it says which event comes next, now and every few seconds
    assert not ledger._snapshots
    await publisher.close()
