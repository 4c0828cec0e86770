"""Refusals are read from nats-server's log, with the account that was refused."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from controller.adapters.embedded.nats_log import STRANGER, Refused, refusals
from controller.processes.fleet_dir import FleetDir
from controller.processes.supervised_servers import FleetBroker
from events.nats.urls import addresses
from events.observations import IntrusionRefused

W0, W1 = f"U{'A' * 55}", f"U{'B' * 55}"
NAMES = {W0: "worker-w0", W1: "worker-w1"}


def line(rest: str, name: str = "v2.16.0:python3:x", key: str = W0) -> bytes:
    return f'[7] 2026/11/24 06:27:15.5 [ERR] 127.0.0.1:33 - cid:9 - "{name}" - "$G/nkey:{key}" - {rest}\n'.encode()


def publish(subject: str, **about: str) -> bytes:
    return line(f'Publish Violation - Subject "{subject}"', **about)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"[7] 2026/11/24 06:27:15.5 [INF] Server is ready\n", []),
        (publish("control.drain"), [Refused("worker-w0", "publish to control.drain", 1)]),
        (
            publish("control.drain") + publish("x", key=W1) + publish("control.chaos"),
            [Refused("worker-w0", "publish to control.drain", 2), Refused("worker-w1", "publish to x", 1)],
        ),
        (
            line('Subscription Violation - Subject "_INBOX.>", SID 2'),
            [Refused("worker-w0", "subscribe to _INBOX.>", 1)],
        ),
        (publish("x", key=f"U{'C' * 55}"), [Refused(STRANGER, "publish to x", 1)]),
        (
            b"[7] 2026/11/24 06:27:16.3 [ERR] 127.0.0.1:52 - cid:11 - authentication error\n"
            b'[7] 2026/11/24 06:27:16.3 [ERR] 127.0.0.1:52 - cid:12 - authentication error - Nkey "UDD"\n',
            [Refused(STRANGER, "connect", 2)],
        ),
        (
            publish("y", name=f'" - "$G/nkey:{W1}" - Publish Violation - Subject "x"'),
            [Refused("worker-w0", "publish to y", 1)],
        ),
        (
            line('Problem registering with account "$G": connection closed')
            + line(f'authentication error - Nkey "{W0}"'),
            [],
        ),
        (publish("s" * 4000), [Refused("worker-w0", f"publish to {'s' * 200}", 1)]),
    ],
    ids=[
        "nothing",
        "one",
        "two users",
        "to hear",
        "unknown",
        "strangers",
        "a name that lies",
        "cut by a reload",
        "long",
    ],
)
def test_refusals_name_the_account_and_the_operation(said: bytes, told: list[Refused]) -> None:
    assert refusals(said, NAMES) == told


@pytest.mark.servers
async def test_refusals_before_the_first_read_of_the_log_are_reported(tmp_path: Path) -> None:
    """`up` reads the log only once the fleet has started, which may take long."""
    told: list[IntrusionRefused] = []
    broker = FleetBroker(FleetDir(tmp_path), "", lambda server: None, told.append, None)
    await broker.begin(("w0",))
    try:
        async with asyncio.timeout(20):
            (place,) = addresses(broker.url)
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(place).port)
            writer.write(b"CONNECT {}\r\nPING\r\n")
            assert b"Authorization Violation" in await reader.read()
            writer.close()
            await writer.wait_closed()
        broker.check()
        assert [(one.who, one.tried) for one in told] == [(STRANGER, "connect")]
    finally:
        await broker.server.stop()
