"""The bus: one suite for the real one and the test double."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from memory_bus import MemoryBus, matches
from waits import turns

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.server import EmbeddedServer
from events.nats.bus import Body, Bus, BusUnavailable, NatsBus, NoAnswer

Eventually = Callable[..., Awaitable[None]]


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.servers)])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    made: Bus = (
        MemoryBus()
        if request.param == "memory"
        else await NatsBus.connect(request.getfixturevalue("nats_server").url, "test")
    )
    yield made
    await made.close()


async def test_published_messages_are_received(bus: Bus, eventually: Eventually) -> None:
    heard: list[tuple[str, Body]] = []
    subscription = await bus.subscribe("live.beat.*", lambda subject, body: heard.append((subject, body)))
    assert await bus.publish("live.beat.w3", {"seq": 1})
    await eventually(lambda: heard)
    assert heard == [("live.beat.w3", {"seq": 1})]
    await subscription.cancel()
    await bus.publish("live.beat.w3", {"seq": 2})
    assert len(heard) == 1


async def test_a_request_is_answered(bus: Bus) -> None:
    async def double(subject: str, body: Body) -> dict[str, Any]:
        await turns()
        return {"twice": body["value"] * 2}

    await bus.subscribe("control.double", double)
    assert await bus.request("control.double", {"value": 21}) == {"twice": 42}


async def test_a_request_without_a_subscriber_fails_at_once(bus: Bus) -> None:
    with pytest.raises(NoAnswer, match="no process subscribes"):
        await bus.request("control.unused", {}, deadline_s=5)


async def test_an_answer_that_never_comes_has_a_deadline(bus: Bus) -> None:
    async def never(subject: str, body: Body) -> None:
        await asyncio.Event().wait()

    await bus.subscribe("control.never", never)
    with pytest.raises(NoAnswer, match="within"):
        await bus.request("control.never", {}, deadline_s=0.05)


async def test_a_broken_handler_does_not_end_the_subscription(nats_server: EmbeddedServer) -> None:
    bus = await NatsBus.connect(nats_server.url, "test")
    calls = []

    def broken(subject: str, body: Body) -> dict[str, Any]:
        calls.append(body)
        return {"value": 1 // body["by"]}

    await bus.subscribe("control.broken", broken)
    assert "error" in await bus.request("control.broken", {"by": 0})
    assert await bus.request("control.broken", {"by": 1}) == {"value": 1}
    assert bus.faults == 1
    await bus.close()


async def test_without_a_broker_publishing_is_false_and_asking_raises() -> None:
    bus = await NatsBus.connect("nats://127.0.0.1:1", "test", wait_s=0.05)
    assert bus.since is None
    assert not await bus.publish("live.beat.w1", {})
    with pytest.raises(BusUnavailable, match="HOLDFAST_NATS_URL"):
        await bus.request("control.status", {})
    await bus.close()


async def test_a_bus_started_without_a_broker_connects_later_and_survives_a_restart(
    own_nats: EmbeddedServer, eventually: Eventually
) -> None:
    await own_nats.kill()
    bus = await NatsBus.connect(own_nats.url, "test", wait_s=0.05)
    heard: list[Body] = []
    await bus.subscribe("live.beat.*", lambda subject, body: heard.append(body))
    for _ in range(2):
        server = await start_nats(own_nats.directory, port=own_nats.port)
        await eventually(lambda: bus.since is not None)
        before = len(heard)
        assert await bus.publish("live.beat.w1", {})
        await eventually(lambda before=before: len(heard) > before)
        await server.kill()
        await eventually(lambda: bus.since is None)
    await bus.close()


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a", "a", True),
    ],
)
def test_patterns_match_as_nats_does(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


async def test_a_bus_without_echo_receives_only_messages_of_others(nats_server: EmbeddedServer) -> None:
    own = await NatsBus.connect(nats_server.url, "own", echo=False)
    other = await NatsBus.connect(nats_server.url, "other")
    heard: list[object] = []
    came = asyncio.Event()

    def hear(subject: str, body: Body) -> None:
        heard.append(body["from"])
        came.set()

    await own.subscribe("live.echo", hear)
    await own.publish("live.echo", {"from": "own"})
    await own.connection.client.flush()
    await other.publish("live.echo", {"from": "other"})
    async with asyncio.timeout(20):
        await came.wait()
    await own.close()
    await other.close()
    assert heard == ["other"]
