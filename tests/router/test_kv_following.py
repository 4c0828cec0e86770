"""KV events over a real broker: from engines to several frontends' indexes, and recovery."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from operator import eq
from typing import Any

import msgspec
from waits import turns, until

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.feeds.kv_events import ASK_S, ASKS_MAX, KvEvents
from controller.router.endpoints import WorkerRank
from events import kv, subjects
from events.blocks import sequence_hashes
from events.kv import Cleared, KvEvent, Removed, Stored, Tier
from events.nats.connection import BrokerConnection
from events.observations import Profile, WorkerJoined
from events.wire import Generate, Sampling
from workers.engines.engine import Announce
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.kv_events.ledger import LedgerBounds
from workers.kv_events.publisher import KvPublisher

Eventually = Callable[..., Awaitable[None]]
Content = set[tuple[int, Tier]]

PROFILE = Profile(kv_blocks=1000, block_tokens=1, max_batch=1, prefill_tokens_per_s=1.0, tpot_ms=((1, 1.0),))


class Engine:
    """The cache of one life of a worker that randomly stores and removes blocks on every rank, and publishes it.

    With `clears` it now and then drops everything, after which every listener knows its complete content.
    """

    def __init__(self, worker: str, instance: str, dp: int = 1, *, clears: bool = True) -> None:
        self.worker, self.instance, self.dp, self.clears = worker, instance, dp, clears
        self.holds: dict[int, Content] = {rank: set() for rank in range(dp)}
        self._dice = random.Random(worker + instance)

    @property
    def joined(self) -> WorkerJoined:
        return WorkerJoined(
            worker=self.worker, instance=self.instance, url="", model="m", revision="r", tokenizer="t", engine="e",
            engine_version="1", dtype="d", tp=1, device="d", profile=PROFILE, canary_key="c", pid=1, dp=self.dp,
            kv_events=True,
        )  # fmt: skip

    def step(self, rank: int) -> list[KvEvent]:
        """Change something. Return the events that an engine step would publish."""
        dice, holds = self._dice, self.holds[rank]
        if self.clears and dice.random() < 0.02:
            holds.clear()
            return [Cleared()]
        names = sequence_hashes([dice.randrange(3) for _ in range(dice.randrange(1, 30))])
        tier = Tier.DEVICE if dice.random() < 0.9 else Tier.HOST
        holds |= {(name, tier) for name in names}
        gone = [block for block, tier in sorted(holds) if tier == Tier.DEVICE and dice.random() < 0.1]
        holds -= {(block, Tier.DEVICE) for block in gone}
        return [Stored(names, None, tier), Removed(gone)]


class Mute:
    """Lives of a worker that receive requests and answer none."""

    def __init__(self, connection: BrokerConnection, lives: int) -> None:
        self.connection = connection
        self.joined = [Engine("mute", f"i{number}").joined for number in range(lives)]
        self.asked: list[bytes] = []  # where the answers would go

    async def listen(self) -> None:
        await self.connection.subscribe_raw("kv.ask.mute.*", lambda s, reply, b, h: self.asked.append(reply))
        await self.connection.client.flush()


class Publisher(KvPublisher):
    """A publisher that can be slow to answer, or muted."""

    silent = False

    def start(self, ranks: int, muted: Callable[[], bool] | None = None) -> None:
        super().start(ranks, muted or (lambda: self.silent))

    def refused(self) -> int:
        """Return the number of the engine's events that contradicted earlier ones."""
        return sum(ledger.refused for ledger in self.ledgers.values())

    async def answer_late(self, late_s: float) -> None:
        """Answer every request this much later from now on."""
        assert self._heard is not None
        await self._heard.cancel()
        answer, loop = self._asked, asyncio.get_running_loop()
        subject = subjects.kv_ask(self.worker, self.instance)

        def asked(subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
            loop.call_later(late_s, answer, subject, reply, body, headers)

        self._heard = await self._connection.subscribe_raw(subject, asked)


class Fleet:
    """Engines with their publishers, and frontends that follow them."""

    def __init__(
        self,
        url: str,
        bounds: LedgerBounds | None = None,
        *,
        ask_s: float = ASK_S,
        next_every_s: float = 0.1,  # so that no test waits for it
    ) -> None:
        self.url, self.bounds = url, bounds
        self.ask_s, self.next_every_s = ask_s, next_every_s
        self.engines: dict[str, Engine] = {}
        self.publishers: dict[str, Publisher] = {}
        self.frontends: list[tuple[KvEvents, asyncio.Task[None]]] = []
        self.connections: list[BrokerConnection] = []  # of workers, and of others
        self.heard_by: dict[KvEvents, BrokerConnection] = {}

    async def add(self, engine: Engine) -> Engine:
        """Add a worker, replacing the one of its name."""
        await self.remove(engine.worker)
        connection = await BrokerConnection.open(self.url, engine.worker)
        self.connections.append(connection)
        publisher = Publisher(
            engine.worker, engine.instance, connection, self.bounds, next_every_s=self.next_every_s
        )
        self.engines[engine.worker], self.publishers[engine.worker] = engine, publisher
        publisher.start(engine.dp)
        await publisher.subscribe()
        self.tell()
        return engine

    async def remove(self, worker: str) -> None:
        if worker in self.engines:
            del self.engines[worker]
            await self.publishers.pop(worker).close()
            self.tell()

    def tell(self) -> None:
        """Tell every frontend which workers are live."""
        for frontend, _ in self.frontends:
            frontend.absorb([engine.joined for engine in self.engines.values()])

    def run(self, steps: int = 1) -> None:
        """Run steps on every rank of every engine, those of the last rank in a separate thread."""
        for engine in self.engines.values():
            announce = self.publishers[engine.worker].announce
            for rank in range(engine.dp):
                said = [engine.step(rank) for _ in range(steps)]

                work = partial(self._announce, announce, rank, said)
                if rank:
                    thread = threading.Thread(target=work)
                    thread.start()
                    thread.join()
                else:
                    work()

    @staticmethod
    def _announce(announce: Announce, rank: int, said: list[list[KvEvent]]) -> None:
        for events in said:
            announce(rank, events)

    async def start_frontend(self) -> KvEvents:
        connection = await BrokerConnection.open(self.url, f"frontend-{len(self.frontends)}")
        frontend = KvEvents(connection, ask_s=self.ask_s)
        self.heard_by[frontend] = connection
        self.frontends.append((frontend, asyncio.create_task(frontend.run())))
        self.tell()
        return frontend

    async def stop_frontend(self, frontend: KvEvents) -> None:
        for known, task in self.frontends:
            if known is frontend:
                task.cancel()
                await asyncio.wait((task,))
                await frontend.close()
        self.frontends = [(known, task) for known, task in self.frontends if known is not frontend]

    def wrong(self) -> list[object]:
        """Return the differences between the frontends' indexes and the engines."""
        truth = {
            WorkerRank(engine.worker, engine.instance, rank): held
            for engine in self.engines.values()
            for rank, held in engine.holds.items()
            if held
        }
        return [
            (place, holder)
            for place, (frontend, _) in enumerate(self.frontends)
            for holder in {*truth, *frontend.view.index.holders}
            if held(frontend, holder) != truth.get(holder, set())
        ]

    def right(self) -> bool:
        return not self.wrong()

    async def close(self) -> None:
        for frontend, _ in list(self.frontends):
            await self.stop_frontend(frontend)
        for worker in list(self.publishers):
            await self.remove(worker)
        for connection in self.connections:
            await connection.close()


def held(frontend: KvEvents, holder: WorkerRank) -> Content:
    return {(block, tier) for tier, _, blocks in frontend.view.index.held(holder) for block in blocks}


@asynccontextmanager
async def fleet(
    url: str, bounds: LedgerBounds | None = None, *, clears: bool = True, **limits: Any
) -> AsyncIterator[Fleet]:
    """Return a fleet of three workers, one with two ranks, and two frontends."""
    made = Fleet(url, bounds, **limits)
    try:
        for name, dp in (("w0", 1), ("w1", 2), ("w.2", 1)):
            await made.add(Engine(name, "a", dp, clears=clears))
        for _ in range(2):
            await made.start_frontend()
        yield made
    finally:
        await made.close()


async def test_every_frontend_tracks_the_engines_caches(nats_server: EmbeddedServer) -> None:
    async with fleet(nats_server.url, LedgerBounds(part_blocks=20)) as made:
        for _ in range(5):
            made.run(3)
            await turns()
        await until(made.right)
        (first, _), (second, _) = made.frontends
        assert all(first.view.complete(holder) for holder in first.view.index.holders)
        assert str(first.view.health).endswith("of 4 of 4 ranks")

        await made.stop_frontend(second)
        made.run(3)
        third = await made.start_frontend()  # it starts empty, and restores everything
        made.run(3)
        await until(made.right)
        counts = third.view.counts  # a rank that it saw cleared needs no request
        assert counts.restored + counts.applied.get(("cleared", "ok"), 0) >= 4
        assert third.view.counts.failed == first.view.counts.failed == 0

        await made.add(Engine("w1", "b", dp=2))  # the next life begins with nothing
        await made.remove("w0")
        made.run(3)
        await until(made.right)
        assert {holder.worker for holder in first.view.index.holders if held(first, holder)} == {"w1", "w.2"}


async def test_events_from_a_broker_outage_are_recovered(own_nats: EmbeddedServer) -> None:
    async with fleet(own_nats.url) as made:
        made.run(3)
        await until(made.right)
        await own_nats.kill()
        await until(lambda: not any(c.connected for c in made.connections))
        made.run(3)  # no engine waits for the broker
        await until(lambda: all(p.dropped for p in made.publishers.values()))
        assert not made.right()
        server = await start_nats(own_nats.directory, port=own_nats.port)
        try:
            await until(made.right, 20)
        finally:
            await made.close()
            await server.kill()


async def test_a_process_that_was_cut_off_catches_up_when_it_reconnects(nats_server: EmbeddedServer) -> None:
    """First a worker, then a frontend. The next events alone would reveal the gap too late."""
    async with fleet(nats_server.url, next_every_s=60.0) as made:
        made.run()
        await until(made.right)
        (frontend, _), _ = made.frontends
        for connection in (made.connections[0], made.heard_by[frontend]):
            changes: list[bool] = []

            def changed(connected: bool, changes: list[bool] = changes) -> None:
                changes.append(connected)
                if changes == [False]:
                    made.run()
                    made.publishers["w0"].flush()  # before the broker is back

            connection.listen(changed)
            transport: Any = connection.client._transport  # break its socket: no interface of ours does that
            transport._io_writer.transport.abort()
            await until(partial(eq, changes, [False, True]))
            await until(made.right)
        assert made.publishers["w0"].dropped > 0 and frontend.view.counts.gaps > 0


async def test_a_new_frontend_restores_everything_while_events_continue_and_some_answers_are_late_or_missing(
    nats_server: EmbeddedServer,
) -> None:
    """More workers than concurrent requests never answer, two answer late, and all continue to cache."""
    async with fleet(nats_server.url, LedgerBounds(part_blocks=50), clears=False, ask_s=0.2) as made:
        made.run(3)
        await until(made.right)  # a frontend that gets a rank's very first events has nothing to restore
        for name in ("w1", "w.2"):
            await made.publishers[name].answer_late(0.05)
        mute = Mute(await BrokerConnection.open(nats_server.url, "mute"), 2 * ASKS_MAX)
        made.connections.append(mute.connection)
        await mute.listen()
        frontend = await made.start_frontend()
        frontend.absorb([*mute.joined, *(engine.joined for engine in made.engines.values())])

        def restored() -> bool:
            made.run()
            return frontend.view.health.complete >= 4 and frontend.view.counts.failed >= ASKS_MAX

        await until(restored, every_s=0.01)
        await until(made.right)
        assert frontend.view.health.complete == 4 and frontend.view.counts.restored >= 4


async def test_the_number_of_concurrent_requests_is_bounded(nats_server: EmbeddedServer) -> None:
    async with fleet(nats_server.url, ask_s=60.0) as made:
        mute = Mute(await BrokerConnection.open(nats_server.url, "mute"), 3 * ASKS_MAX)
        made.connections.append(mute.connection)
        await mute.listen()
        frontend, _ = made.frontends[0]
        frontend.absorb(mute.joined)
        for answered in range(3):
            await until(lambda: len(mute.asked) >= ASKS_MAX + answered)  # noqa: B023 (it is awaited in the loop)
            for connection in (
                made.heard_by[frontend],
                mute.connection,
            ):  # anything that was sent has arrived
                await connection.client.flush()
            assert len(mute.asked) == ASKS_MAX + answered
            mute.connection.client.post(mute.asked[answered] + b" ", b"", kv.encode(kv.KvRefused("not now")))
            mute.connection.client.write()


async def test_invalid_messages_are_counted_and_change_nothing(nats_server: EmbeddedServer) -> None:
    async with fleet(nats_server.url) as made:
        made.run(3)
        await until(made.right)
        frontend, _ = made.frontends[0]
        stranger = made.connections[0]
        of_another = kv.encode(kv.KvBatch("w1", "a", 0, 1_000, []))
        for body in (b"", b"\xc1", b"{}", kv.encode(["w0", "a", "x", 0, []]), of_another):
            await stranger.client.publish(subjects.kv_events("w0"), body)
        await until(lambda: frontend.bad == 5)
        liar = await stranger.subscribe_raw(subjects.kv_ask("liar", "a"), _lie(stranger))
        frontend.absorb([Engine("liar", "a").joined, *(engine.joined for engine in made.engines.values())])
        await until(lambda: frontend.bad == 6)
        await liar.cancel()
        made.run(3)
        await until(made.right)


def _lie(connection: BrokerConnection) -> Callable[[bytes, bytes, bytes, bytes | None], None]:
    def answer(subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        connection.client.post(reply + b" ", b"", b"\xc1")
        connection.client.write()

    return answer


async def test_a_worker_rejects_invalid_requests_and_those_for_others(nats_server: EmbeddedServer) -> None:
    async with fleet(nats_server.url) as made:
        subject, asker = subjects.kv_ask("w0", "a"), made.connections[1]
        for body in (b"\xc1", kv.encode(kv.KvRequest(rank=1)), kv.encode(kv.KvRequest(rank=-1))):
            answer = kv.answer((await asker.request(subject, body, 5.0)).body)
            assert isinstance(answer, kv.KvRefused)


async def test_a_frontend_catches_up_with_a_muted_worker(nats_server: EmbeddedServer) -> None:
    async with fleet(nats_server.url, ask_s=0.1) as made:
        publisher = made.publishers["w1"]
        publisher.silent = True
        made.run(3)
        await until(lambda: publisher.dropped > 0)
        assert publisher.blocks == sum(
            len({block for block, _ in h}) for h in made.engines["w1"].holds.values()
        )
        publisher.silent = False
        await until(made.right)
        assert publisher.refused() == 0


async def test_events_of_one_step_are_sent_in_small_messages(nats_server: EmbeddedServer) -> None:
    async with fleet(nats_server.url, LedgerBounds(part_bytes=1000)) as made:
        await until(lambda: all(frontend.view.health.complete == 4 for frontend, _ in made.frontends))
        listener, sizes = await BrokerConnection.open(nats_server.url, "listener"), []
        try:
            await listener.subscribe_raw(subjects.KV_EVENTS, lambda s, r, body, h: sizes.append(len(body)))
            await listener.client.flush()
            for block in range(1000):
                made.publishers["w0"].announce(0, [Stored([block + 1])])
            made.engines["w0"].holds[0] = {(block + 1, Tier.DEVICE) for block in range(1000)}
            await until(made.right)  # by events alone: a complete frontend sends no request
            await listener.client.flush()
        finally:
            await listener.close()
        messages = [size for size in sizes if size > 100]
        assert 10 < len(messages) < 40 and max(messages) < 1200


async def test_unsent_events_are_not_announced_as_missing(nats_server: EmbeddedServer) -> None:
    async with fleet(nats_server.url) as made:
        await until(lambda: all(frontend.view.health.complete == 4 for frontend, _ in made.frontends))
        before = [frontend.view.counts.gaps for frontend, _ in made.frontends]
        for _ in range(5):
            made.run()
            for publisher in made.publishers.values():
                publisher.announce_next()  # as it does periodically, and when the broker is back
            await until(made.right)
        assert [frontend.view.counts.gaps for frontend, _ in made.frontends] == before


def test_a_batch_decodes_to_its_events() -> None:
    """The publisher assembles a batch from encoded events."""
    body = kv.encode(["w0", "a", 0, 3, [msgspec.Raw(kv.encode(Stored([1], 2)))]])
    assert kv.batch(body) == kv.KvBatch("w0", "a", 0, 3, [Stored([1], 2)])


# --- engines with a real cache


def holds(engine: SimulatedEngine, rank: int) -> Content:
    """Return the blocks of a rank of a simulated engine, on all tiers."""
    manager = engine.each[rank].scheduler.kv
    held = {(block, Tier.DEVICE) for block in manager.parents}  # those with a name, in use or idle
    if manager.slow is not None:
        held |= {(block, tier) for tier in (Tier.HOST, Tier.DISK) for block in manager.slow.held[tier]}
    return held


async def test_simulated_engines_are_followed_through_evictions_tiers_and_losses(
    nats_server: EmbeddedServer,
) -> None:
    shape = EngineShape(block_tokens=4, kv_blocks=40, context_tokens=100)
    tiered = EngineShape(
        block_tokens=4, kv_blocks=40, context_tokens=100, host_kv_blocks=20, disk_kv_blocks=20
    )
    dice, over = random.Random(1), set[int]()
    async with fleet(nats_server.url) as made:
        engines = {
            "w0": SimulatedEngine(shape),
            "w1": SimulatedEngine(shape, dp=2),
            "w.2": SimulatedEngine(tiered),
        }
        for name, engine in engines.items():
            await engine.start(
                lambda out: over.update(key for key, chunk in out if chunk.finish),
                made.publishers[name].announce,
            )
        for key in range(1, 241):
            tokens = [dice.randrange(2) for _ in range(dice.randrange(4, 60))]
            name = dice.choice(list(engines))
            engines[name].submit(
                key,
                Generate(key, f"r{key}", tokens, len(tokens), Sampling(max_tokens=dice.randrange(1, 30)),
                         canary=key % 20 == 0, rank=key % engines[name].identity.dp),
            )  # fmt: skip
            if key % 30 == 0:
                await until(lambda: len(over) == key)  # noqa: B023 (it is awaited in the loop)
                made.publishers["w1"].silent = key == 90
        await made.start_frontend()
        truth = {
            WorkerRank(name, "a", rank): holds(engine, rank)
            for name, engine in engines.items()
            for rank in range(engine.identity.dp)
        }
        assert all(len(content) > 20 for content in truth.values())
        assert {tier for _, tier in truth[WorkerRank("w.2", "a")]} == set(Tier)
        await until(
            lambda: all(held(f, h) == content for f, _ in made.frontends for h, content in truth.items())
        )
        assert not any(publisher.refused() for publisher in made.publishers.values())
        assert made.publishers["w1"].dropped > 0
        for engine in engines.values():
            await engine.stop()
