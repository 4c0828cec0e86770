"""Channels through a real broker: dialled and missed, broken, split, held back."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from two_sides import SUBJECT, RecordingPeer, World
from waits import block_until

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.server import EmbeddedServer
from events import subjects
from events.nats.channel import SILENT_S_MAX, WINDOW_BYTES, NoResponders
from events.nats.channels import Channels

pytestmark = pytest.mark.servers
Eventually = Callable[..., Awaitable[None]]


@pytest.fixture
async def world(own_nats: EmbeddedServer) -> AsyncIterator[World]:
    made = await World.of(own_nats.url)
    yield made
    await made.close()


async def test_bytes_go_both_ways_in_order(world: World, eventually: Eventually) -> None:
    near, far = await world.pair()
    said = [bytes([n % 256]) * (1 + n * 37 % 3000) for n in range(500)]
    for piece in said:
        near.channel.write(piece)
        far.channel.write(piece[::-1])
    await eventually(lambda: len(far.heard) == len(near.heard) == sum(map(len, said)))
    assert bytes(far.heard) == b"".join(said)
    assert bytes(near.heard) == b"".join(said)


async def test_the_broker_reports_a_subject_without_a_subscriber_at_once(world: World) -> None:
    async with asyncio.timeout(20):  # without the broker's notice it would wait forever
        with pytest.raises(NoResponders):
            await world.near.dial(subjects.plane("w1", "i2"), RecordingPeer)
    assert world.near.count == 0


async def test_a_closed_listener_accepts_no_channels_and_keeps_open_ones(
    world: World, eventually: Eventually
) -> None:
    listener = await world.far.listen(other := subjects.plane("w2", "i1"), RecordingPeer)
    inside = await world.near.dial(other, RecordingPeer)
    assert isinstance(inside, RecordingPeer)
    listener.close()
    with pytest.raises(ConnectionResetError, match="no channels are accepted here"):
        await world.near.dial(other, RecordingPeer)
    assert not inside.lost


async def test_a_dead_peer_of_a_channel_in_use_is_noticed_in_a_tenth_of_a_second(
    world: World, eventually: Eventually
) -> None:
    used, far = await world.pair()
    idle, _ = await world.pair()
    far.channel.write(b"token")
    await eventually(lambda: used.heard)
    died = time.monotonic()
    await world.far.close()
    await eventually(lambda: used.lost and idle.lost)
    assert isinstance(used.lost[0], NoResponders) and isinstance(idle.lost[0], NoResponders)
    assert (
        used.ended_at - died < SILENT_S_MAX / 2
    )  # without signs of life it would take longer; 0.05 s are expected
    assert used.ended_at < idle.ended_at


async def test_all_channels_end_with_the_broker_and_new_ones_open_after_its_restart(
    own_nats: EmbeddedServer, background: Any, tmp_path: Path, eventually: Eventually
) -> None:
    world = await World.of(own_nats.url)
    near, far = await world.pair()
    await own_nats.kill()
    await eventually(lambda: near.lost and far.lost)
    assert "the connection to the broker is lost" in str(near.lost[0])
    near.channel.write(b"into the void")
    again = background.run(start_nats(tmp_path / "again", port=own_nats.port))
    try:
        await eventually(lambda: world.near.connection.connected and world.far.connection.connected)
        near, far = await world.pair()
        near.channel.write(b"back")
        await eventually(lambda: far.heard == b"back")
    finally:
        await world.close()
        background.run(again.kill())


async def test_a_worker_started_without_a_broker_is_reachable_once_there_is_one(
    own_nats: EmbeddedServer, background: Any, tmp_path: Path, eventually: Eventually
) -> None:
    await own_nats.kill()
    far = await Channels.open(own_nats.url, "far", wait_s=0.05)
    world = World(far, far)
    await far.listen(SUBJECT, world.enter)
    again = background.run(start_nats(tmp_path / "again", port=own_nats.port))
    try:
        await eventually(lambda: far.connection.connected)
        await world.pair()
    finally:
        await far.close()
        background.run(again.kill())


async def test_data_larger_than_the_brokers_payload_is_sent_in_pieces(
    background: Any, tmp_path: Path, eventually: Eventually
) -> None:
    server = background.run(start_nats(tmp_path / "small", max_payload=2048))
    world = await World.of(server.url)
    try:
        near, far = await world.pair()
        near.channel.write(prompt := bytes(range(256)) * 4000)
        await eventually(lambda: len(far.heard) == len(prompt))
        assert far.heard == prompt
    finally:
        await world.close()
        background.run(server.kill())


async def test_unread_data_is_held_back_before_the_broker(world: World, eventually: Eventually) -> None:
    near, far = await world.pair()
    near.channel.pause_reading()
    far.channel.write(bytes(4 * WINDOW_BYTES))
    await eventually(lambda: len(near.channel.incoming.held) == WINDOW_BYTES)
    for side in (world.far, world.near):  # all that was sent has arrived: the broker keeps the order
        await side.connection.client.flush()
    assert len(near.channel.incoming.held) == WINDOW_BYTES
    assert (far.channel.get_write_buffer_size(), far.paused) == (3 * WINDOW_BYTES, True)
    near.channel.resume_reading()
    await eventually(lambda: len(near.heard) == 4 * WINDOW_BYTES and not far.paused)


async def test_a_message_that_the_broker_drops_breaks_the_channel_on_both_sides(
    world: World, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = await world.pair()
    with monkeypatch.context() as patch:
        patch.setattr(world.far, "post", lambda *message: None)
        far.channel.write(b"a token")
        far.channel.pump()
    far.channel.write(b"the next one")
    await eventually(lambda: near.lost and far.lost)
    assert near.heard == b""


async def test_a_message_on_an_unknown_channel_is_answered_with_a_reset(
    world: World, eventually: Eventually
) -> None:
    near, far = await world.pair()
    world.far.forget(far.channel)
    near.channel.write(b"hello?")
    await eventually(lambda: near.lost)
    assert "this channel is not open" in str(near.lost[0])


async def test_rubbish_on_a_subject_is_harmless(world: World, eventually: Eventually) -> None:
    near, far = await world.pair()
    for body in (b"", b"x", b"\xff" * 17, b"\x01" + bytes(16), b"\x01" + bytes(16) + b"99"):
        for subject in (f"{SUBJECT}.unused", f"{SUBJECT}.a.b", "plane"):
            await world.near.connection.client.publish(subject, body)
            await world.near.connection.client.publish(subject, body, reply="somewhere")
    near.channel.write(b"still here")
    await eventually(lambda: far.heard == b"still here")
    assert len(world.let_in) == 1


async def test_what_lies_unread_in_the_brokers_socket_is_counted(
    world: World, eventually: Eventually
) -> None:
    near, far = await world.pair()
    assert world.near.unread() == 0
    before = world.near.taken
    far.channel.write(b"x" * 1000)
    far.channel.pump()
    world.far.connection.client.write()
    block_until(lambda: world.near.unread() >= 1000)  # the loop does not read meanwhile
    await eventually(lambda: len(near.heard) == 1000)
    assert world.near.taken - before >= 1000
