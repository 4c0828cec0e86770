"""A peer without the fleet key gets neither prompts nor answers, on either side of a connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transports import Road
from waits import until

from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.worker_links import Address
from controller.ports import WorkerUnreachable
from events import wire
from events.errors import BadSetting
from events.fleet_key import FleetKey, FrontendHandshake, UnknownPeer, WorkerHandshake
from events.wire import Challenge, Chunk, Generate, Hello, Proof, Sampling, Welcome
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.server import WorkerServer

OURS, OTHERS = FleetKey(b"the fleet's own key"), FleetKey(b"another fleet's key")
ASKED = Generate(0, "r", [300, 301, 302], 3, Sampling(max_tokens=4))


class RecordingSink:
    """A sink that records the answer and its end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.over = asyncio.Event()

    def take(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        if chunk.finish or chunk.error:
            self.over.set()

    def flush(self) -> None: ...
    def lost(self, cause: str, detail: str) -> None:
        self.over.set()


@asynccontextmanager
async def worker(key: FleetKey | None) -> AsyncIterator[tuple[WorkerServer, str]]:
    engine = SimulatedEngine(EngineShape())
    server = WorkerServer(worker="w1", instance="i1", engine=engine, key=key)
    await engine.start(server.deliver)
    host, port = await server.start("127.0.0.1", 0)
    try:
        yield server, f"tcp://{host}:{port}"
    finally:
        await server.close()
        await engine.stop()


@asynccontextmanager
async def frontend(key: FleetKey | None, url: str) -> AsyncIterator[RequestPlaneClient]:
    plane = RequestPlaneClient("f1", key=key)
    plane.set_workers({"w1": Address("i1", url)})
    task = asyncio.create_task(plane.run())
    try:
        yield plane
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("key", [OURS, None])
async def test_a_peer_with_the_key_is_served(key: FleetKey | None) -> None:
    async with worker(key) as (server, url), frontend(key, url) as plane:
        await until(lambda: plane.reachable("w1", "i1"))
        sink = RecordingSink()
        plane.open("w1", "i1", ASKED, sink)
        async with asyncio.timeout(20):
            await sink.over.wait()
        assert len(sink.tokens) == 4 and server.counters.strangers == 0


async def test_the_key_is_required_over_the_broker_too(road: Road) -> None:
    """The frames are the same on both roads; here the whole exchange uses each."""
    engine = SimulatedEngine(EngineShape())
    server = WorkerServer(worker="w1", instance="i1", engine=engine, key=OURS)
    await engine.start(server.deliver)
    if road.workers is None:
        url = "tcp://{}:{}".format(*await server.start("127.0.0.1", 0))
    else:
        url = "nats:plane.w1.i1"
        await server.start_behind(road.workers, "plane.w1.i1")
    plane, stranger = road.plane("f1", key=OURS), road.plane("f2", key=OTHERS)
    for one in (plane, stranger):
        one.set_workers({"w1": Address("i1", url)})
    tasks = [asyncio.create_task(one.run()) for one in (plane, stranger)]
    await until(lambda: plane.reachable("w1", "i1"))
    await until(lambda: "another one" in stranger.why("w1"))
    assert not stranger.connected
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.close()
    await engine.stop()


@pytest.mark.parametrize(
    ("workers", "frontends", "why"),
    [
        (OURS, None, "set --fleet-key-file"),
        (None, OURS, "does not ask for the fleet key"),
        (OURS, OTHERS, "uses another one"),
    ],
)
async def test_a_peer_without_the_key_receives_nothing(
    workers: FleetKey | None, frontends: FleetKey | None, why: str
) -> None:
    async with worker(workers) as (server, url), frontend(frontends, url) as plane:
        await until(lambda: why in plane.why("w1"))
        with pytest.raises(WorkerUnreachable):
            plane.open("w1", "i1", ASKED, RecordingSink())
        assert server.counters.requests == 0 and not server.connections.any_greeted


async def said_to(url: str, *frames: wire.ToWorker) -> list[wire.ToFrontend]:
    """Send these frames to a worker without waiting for its replies. Return all that it sends until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(b"".join(wire.encode(frame) for frame in frames))
    async with asyncio.timeout(20):
        heard = await reader.read()
    writer.close()
    return [wire.to_frontend.decode(body) for body in wire.Splitter().feed(heard)]


@pytest.mark.parametrize(
    "frames",
    [
        (Hello("f1"), ASKED),
        (Hello("f1", nonce=b"n" * 16), Proof(b""), ASKED),
        (Hello("f1", nonce=b"n" * 16), Proof(b"p" * 32), ASKED),
        (Hello("f1", nonce=b"n" * 16), Hello("f1", nonce=b"n" * 16), Proof(b"p" * 32)),
        (Proof(b"p" * 32), ASKED),
    ],
)
async def test_a_peer_that_does_not_wait_for_the_challenge_is_not_served_either(
    frames: tuple[wire.ToWorker, ...],
) -> None:
    async with worker(OURS) as (server, url):
        heard = await said_to(url, *frames)
        assert all(isinstance(frame, Challenge) for frame in heard)
        assert server.counters.requests == 0 and not server.connections.any_greeted


async def test_recorded_frames_prove_nothing_again() -> None:
    """An observer of a frontend's handshake replays all its frames."""
    async with worker(OURS) as (server, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        ours = FrontendHandshake(OURS)
        hello = ours.hello("f1")
        writer.write(wire.encode(hello))
        head = await reader.readexactly(4)
        challenge = wire.to_frontend.decode(await reader.readexactly(int.from_bytes(head, "little")))
        assert isinstance(challenge, Challenge)
        proof = ours.answer(challenge)
        writer.write(wire.encode(proof))
        head = await reader.readexactly(4)
        assert isinstance(
            wire.to_frontend.decode(await reader.readexactly(int.from_bytes(head, "little"))), Welcome
        )
        writer.close()
        heard = await said_to(url, hello, proof, ASKED)
        assert [type(frame) for frame in heard] == [Challenge]
        assert server.counters.strangers == 1 and server.counters.requests == 0


def test_a_workers_proof_is_not_valid_as_a_frontends() -> None:
    """A proof requested from a worker cannot be passed on as one's own, to that worker or to another one."""
    first, second = WorkerHandshake(OURS), WorkerHandshake(OURS)
    asked = second.challenge(Hello("f1", nonce=b"n" * 16))
    assert asked is not None
    mirrored = first.challenge(Hello("f1", nonce=asked.nonce))
    assert mirrored is not None
    for worker_side in (first, second):
        with pytest.raises(UnknownPeer):
            worker_side.proven(Proof(mirrored.proof))


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_no_other_bytes_are_a_valid_proof(nonce: bytes, proof: bytes) -> None:
    side = FrontendHandshake(OURS)
    side.hello("f1")
    with pytest.raises(UnknownPeer):
        side.answer(Challenge(nonce, proof))
    assert not side.proven


def test_a_key_is_created_once_and_readable_only_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "fleet.key"
    first, again = FleetKey.kept(path), FleetKey.kept(path)
    assert (
        first.proof("worker", b"x")
        == again.proof("worker", b"x")
        == FleetKey.read(path).proof("worker", b"x")
    )
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert path.read_text().strip() not in f"{first!r} {first} {vars(FleetKey)}"


@pytest.mark.parametrize(
    ("content", "why"), [(b"short\n", "holds 5 bytes"), (b"x" * 5000, "holds 4097 bytes")]
)
def test_an_invalid_key_file_is_refused_with_a_message(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "key"
    with pytest.raises(BadSetting, match="No such file"):
        FleetKey.read(path)
    path.write_bytes(content)
    with pytest.raises(BadSetting, match=why):
        FleetKey.read(path)
