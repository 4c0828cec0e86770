"""Channels through brokers as operators run them: with accounts, TLS, in a cluster, and with limits."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from certificates import certificate
from own_brokers import Broker, Start
from structlog.testing import capture_logs
from two_sides import RecordingPeer, World

from controller.adapters.control_api import ControlApi
from controller.adapters.embedded.free_port import free_port
from events.nats import connection
from events.nats.bus import NatsBus
from events.nats.channel import WINDOW_BYTES
from events.nats.channels import Channels
from events.nats.connection import BrokerConnection

pytestmark = pytest.mark.servers
Eventually = Callable[..., Awaitable[None]]
ACCOUNT = 'accounts { FLEET { users: [{ user: "fleet", password: "p@ss/w:rd" }] } }'
WRITTEN = "fleet:p%40ss%2Fw%3Ard"
BIG = bytes(range(256)) * 8192  # 2 MiB


@contextlib.asynccontextmanager
async def world(near: str, far: str) -> AsyncIterator[World]:
    made = await World.of(near, far)
    try:
        yield made
    finally:
        await made.close()


async def talk(world: World, eventually: Eventually) -> tuple[RecordingPeer, RecordingPeer]:
    """Check that a new channel carries a lot of data both ways; return its two sides."""
    near, far = await world.pair()
    near.channel.write(BIG)
    far.channel.write(BIG[::-1])
    await eventually(lambda: len(far.heard) == len(near.heard) == len(BIG), 30)
    assert far.heard == BIG and near.heard == BIG[::-1]
    return near, far


async def test_an_account_with_reserved_characters_in_its_password(
    start: Start, eventually: Eventually
) -> None:
    broker = await start(ACCOUNT)
    async with world(broker.url(WRITTEN), broker.url(WRITTEN)) as made:
        await talk(made, eventually)


async def test_a_token_is_enough(start: Start, eventually: Eventually) -> None:
    broker = await start('authorization { token: "s3/cret" }')
    async with world(broker.url("s3%2Fcret"), broker.url("s3%2Fcret")) as made:
        await talk(made, eventually)


async def test_an_operator_with_that_account_is_answered(start: Start) -> None:
    class Operator:
        async def ours_to_answer(self) -> bool:
            return True

        async def status(self) -> dict[str, str]:
            return {"leader": "c1"}

    for config, account in ((ACCOUNT, WRITTEN), ('authorization { token: "s3/cret" }', "s3%2Fcret")):
        broker = await start(config)
        api = ControlApi(broker.url(account), Operator(), Operator())  # type: ignore[arg-type]
        serving = asyncio.ensure_future(api.run())
        bus = await NatsBus.connect(broker.url(account), "operator")
        async with asyncio.timeout(20):
            await api.serving.wait()
        assert await bus.request("control.status", {}) == {"leader": "c1"}
        await bus.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_a_refused_client_learns_why_and_the_password_is_not_shown(start: Start) -> None:
    broker = await start(ACCOUNT)
    with capture_logs() as logs:
        await (await Channels.open(broker.url("fleet:wrong"), "near", wait_s=1.0)).close()
    (line,) = [line for line in logs if line["event"] == "nats_away"]
    assert "Authorization Violation" in line["why"]
    assert "wrong" not in str(line)


async def test_a_channel_under_tls(
    start: Start, authority: str, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await start(authority)
    async with world(broker.url(scheme="tls"), broker.url(scheme="tls")) as made:
        near, _ = await talk(made, eventually)
        await eventually(lambda: made.near.unread() == 0)
        await made.far.close()
        await eventually(lambda: near.lost)
    assert not caplog.records, "closing a connection is no error"


async def test_an_untrusted_certificate_of_a_broker_is_named(start: Start, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    broker = await start(f'tls {{ cert_file: "{cert}", key_file: "{key}" }}')
    connection = await BrokerConnection.open(broker.url(scheme="tls"), "near", wait_s=1.0)
    try:
        assert not connection.connected
        assert "certificate" in connection.why and "not permitted" not in connection.why
    finally:
        await connection.close()


async def test_the_expiry_of_the_brokers_certificate_is_known(start: Start, authority: str) -> None:
    for config, scheme, days in ((authority, "tls", 2), ("", "nats", None)):
        connection = await BrokerConnection.open((await start(config)).url(scheme=scheme), "near")
        ends = connection.certificate_ends
        assert (ends and round((ends - time.time()) / 86_400)) == days
        await connection.close()
        assert connection.certificate_ends is None


async def cluster(start: Start) -> tuple[Broker, Broker]:
    routes = [free_port(), free_port()]
    both = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
    first, second = [
        await start(
            f'{ACCOUNT}\nserver_name: n{port}\ncluster {{ name: c, listen: "127.0.0.1:{port}", routes: [{both}] }}'
        )
        for port in routes
    ]
    return first, second


async def test_channels_between_two_members_of_a_cluster_of_which_one_dies(
    start: Start, eventually: Eventually
) -> None:
    first, second = await cluster(start)
    async with world(first.url(WRITTEN), second.url(WRITTEN)) as made:
        await made.reachable()
        near, far = await talk(made, eventually)
        first.kill()  # its clients know the other one from it alone
        await eventually(lambda: near.lost and far.lost, 20)
        await eventually(lambda: made.near.connection.connected, 20)
        await made.reachable()
        await talk(made, eventually)


async def test_a_slow_reader_that_the_broker_disconnects_loses_its_channels_and_reconnects(
    start: Start, eventually: Eventually
) -> None:
    broker = await start('max_payload: 65536\nmax_pending: 1048576\nwrite_deadline: "500ms"')
    async with world(broker.url(), broker.url()) as made:
        others = [await made.pair() for _ in range(64)]  # together they may send 16 MiB unread
        transport: Any = made.near.connection.client._transport
        transport._io_reader._transport.pause_reading()
        for _, far in others:
            far.channel.write(bytes(WINDOW_BYTES))
        await eventually(lambda: all(near.lost and far.lost for near, far in others), 30)
        await eventually(lambda: made.near.connection.connected)
        await talk(made, eventually)


@pytest.mark.slow
async def test_a_broker_that_accepts_no_more_data_is_disconnected(
    start: Start, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsent data for it must not block us: its host may be gone forever."""
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.2)
    broker = await start("")
    async with world(broker.url(), broker.url()) as made:
        near, _ = await made.pair()
        os.kill(broker.process.pid, signal.SIGSTOP)
        client = made.near.connection.client
        for _ in range(400):
            client.post(b"a.b.c  ", b"", bytes(60_000))
            client.write()
        await eventually(lambda: near.lost)
        os.kill(broker.process.pid, signal.SIGCONT)
        await made.reachable()
