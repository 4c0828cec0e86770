"""`follow` yields events, typed and in order, and a durable name continues where its program stopped."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from waits import until

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.server import EmbeddedServer
from events import follow as module
from events.errors import UsageError
from events.follow import CannotFollow, FollowedEvent, follow
from events.journal.nats import NatsJournal
from events.observations import CanaryFailed, WorkerHeard

WITHIN_S = 20.0

pytestmark = pytest.mark.servers


@pytest.fixture
async def journal(nats_url: str, tmp_path: Path) -> AsyncIterator[NatsJournal]:
    made = await NatsJournal.connect(nats_url, "test:follow", tmp_path / "spool")
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make redelivery quick."""
    for name, value in {"ACK_WAIT_S": 1.0, "STILL_S": 0.1, "FETCH_S": 0.5}.items():
        monkeypatch.setattr(module, name, value)


def heard(number: int) -> WorkerHeard:
    return WorkerHeard(worker="w1", instance=f"i{number}", observer="o")


def failed(worker: str) -> CanaryFailed:
    return CanaryFailed(
        worker=worker, instance="i", canary_key="k", canary="c", check_type="scheduled", sent_under=0,
        sent_at=datetime(2026, 1, 1, tzinfo=UTC), latency_ms=5.0, reason="timeout", confirmed=False,
    )  # fmt: skip


async def said(journal: NatsJournal, *facts: Any) -> list[str]:
    ids = [journal.observe(fact) for fact in facts]
    assert await journal.flush(5)
    return ids


async def taken(url: str, count: int, **how: Any) -> list[FollowedEvent]:
    """Follow until `count` events were processed, and leave; the last one counts as processed only if the loop requested one
    more."""
    found: list[FollowedEvent] = []
    following = follow(url, **how)
    async with asyncio.timeout(WITHIN_S):
        async for event in following:
            found.append(event)
            if len(found) == count:
                break
    await following.aclose()
    return found


async def test_an_event_has_what_cloudevents_has_and_its_fact(nats_url: str, journal: NatsJournal) -> None:
    (id,) = await said(journal, failed("w2"))
    (event,) = await taken(nats_url, 1)
    assert (event.id, event.type, event.seq) == (id, "holdfast.canary_failed", 1)
    assert event.subject == "fleet.observed.worker.w2.canary_failed" and event.source == journal.source
    assert event.fact == failed("w2") and event.data["reason"] == "timeout"
    assert event.time is not None and abs(event.at - event.time) < timedelta(minutes=1)


async def test_kinds_are_chosen_by_class_or_name(nats_url: str, journal: NatsJournal) -> None:
    await said(journal, heard(1), failed("w2"), heard(2), failed("w3"))
    for kinds in ([CanaryFailed], ["canary_failed"]):
        assert [event.fact.worker for event in await taken(nats_url, 2, kinds=kinds)] == ["w2", "w3"]  # type: ignore[attr-defined]


async def test_it_begins_where_since_says(nats_url: str, journal: NatsJournal) -> None:
    await said(journal, *(heard(n) for n in range(3)))
    (third,) = await taken(nats_url, 1, since=3)
    assert third.fact == heard(2)
    (since,) = await taken(nats_url, 1, since=third.at)
    assert since.at >= third.at and since.seq <= 3
    following = asyncio.create_task(taken(nats_url, 1, since="now"))
    for number in range(100, 200):  # until the follower is subscribed
        await said(journal, heard(number))
        await asyncio.wait({following}, timeout=0.05)
        if following.done():
            break
    assert (await following)[0].seq > 3


async def test_a_durable_name_continues_with_the_event_in_progress(
    nats_url: str, journal: NatsJournal
) -> None:
    await said(journal, *(heard(n) for n in range(6)))
    first = await taken(nats_url, 3, durable="app")
    second = await taken(nats_url, 4, durable="app")
    assert [event.fact for event in first] == [heard(0), heard(1), heard(2)]
    assert [event.fact for event in second] == [heard(2), heard(3), heard(4), heard(5)], (
        "it had not asked for the next"
    )
    assert [event.fact for event in await taken(nats_url, 1, durable="another")] == [heard(0)]


async def test_a_reader_that_stops_returns_its_event_to_the_next_reader_at_once(
    nats_url: str, journal: NatsJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ACK_WAIT_S", 10 * WITHIN_S)
    await said(journal, heard(0), heard(1))
    for wanted in ([heard(0)], [heard(0), heard(1)]):
        assert [event.fact for event in await taken(nats_url, len(wanted), durable="app")] == wanted


async def test_a_durable_name_may_follow_other_kinds_from_its_position_on(
    nats_url: str, journal: NatsJournal
) -> None:
    await said(journal, heard(0), failed("w0"), heard(1), failed("w1"), heard(2))
    first = await taken(nats_url, 2, durable="app", kinds=[WorkerHeard])
    assert [event.pending for event in first] == [2, 1]
    how = {"durable": "app", "kinds": [WorkerHeard, CanaryFailed], "may_change_kinds": True}
    second = await taken(nats_url, 3, **how)
    assert [event.fact for event in second] == [heard(1), failed("w1"), heard(2)]


@pytest.mark.slow
async def test_an_event_that_takes_long_is_not_delivered_twice(nats_url: str, journal: NatsJournal) -> None:
    await said(journal, heard(0), heard(1))
    found = []
    following = follow(nats_url, durable="slow")
    async with asyncio.timeout(WITHIN_S):
        async for event in following:
            found.append(event.fact)
            await asyncio.sleep(2 * module.ACK_WAIT_S)  # the time that it takes is tested
            if len(found) == 2:
                break
    await following.aclose()
    assert found == [heard(0), heard(1)]


async def test_messages_that_are_no_events_are_skipped(nats_url: str, journal: NatsJournal) -> None:
    await said(journal, heard(0))
    client = await nats.connect(nats_url)
    await client.jetstream().publish("fleet.observed.worker.w1.worker_heard", b"no event")
    await client.close()
    await said(journal, heard(1))
    for how in ({}, {"durable": "app"}):
        assert [event.fact for event in await taken(nats_url, 2, **how)] == [heard(0), heard(1)]


async def test_a_reader_continues_after_the_broker_has_dropped_its_consumer(
    nats_url: str, journal: NatsJournal
) -> None:
    await said(journal, heard(0))
    following, client = follow(nats_url), await nats.connect(nats_url)
    async with asyncio.timeout(WITHIN_S):
        assert (await anext(following)).fact == heard(0)
        coming = asyncio.ensure_future(anext(following))
        for consumer in await client.jetstream().consumers_info("FLEET"):
            await client.jetstream().delete_consumer("FLEET", consumer.name)
        await said(journal, heard(1))
        assert (await coming).fact == heard(1)
    await following.aclose()
    await client.close()


@pytest.mark.slow
@pytest.mark.parametrize("durable", ["", "app"])
async def test_no_event_is_missed_when_the_broker_dies_meanwhile(
    own_nats: EmbeddedServer, journal: NatsJournal, durable: str
) -> None:
    """Without acknowledgements the broker considers sent events delivered."""
    await said(journal, *(heard(n) for n in range(40)))
    following = follow(own_nats.url, durable=durable)
    async with asyncio.timeout(4 * WITHIN_S):
        found = [(await anext(following)).fact for _ in range(10)]
        await own_nats.kill()
        again = await start_nats(own_nats.directory, port=own_nats.port)
        try:
            journal.observe(heard(40))
            while heard(40) not in found:
                found.append((await anext(following)).fact)
        finally:
            await following.aclose()
            await again.kill()
    assert list(dict.fromkeys(found)) == [heard(n) for n in range(41)]


@pytest.mark.parametrize("breaks", [False, True], ids=["more comes", "the connection breaks"])
async def test_events_lost_in_flight_are_read_again(
    nats_url: str, journal: NatsJournal, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another subscriber takes this reader's messages: to the broker they are delivered, like those lost with a connection."""
    connected, clients = module._connected, list[Client]()

    async def noted(url: str) -> Client:
        clients.append(await connected(url))
        return clients[-1]

    monkeypatch.setattr(module, "_connected", noted)
    following, other = follow(nats_url, since="now"), await nats.connect(nats_url)
    stream = other.jetstream()
    await said(journal, heard(-1))
    async with asyncio.timeout(4 * WITHIN_S):
        coming = asyncio.ensure_future(anext(following))
        consumers = await until(lambda: stream.consumers_info("FLEET"))
        await said(journal, heard(0))
        assert (await coming).fact == heard(0)
        taker = await stream.pull_subscribe_bind(consumer=consumers[0].name, stream="FLEET")
        await said(journal, *(heard(n) for n in range(1, 4)))
        assert len(await taker.fetch(3, timeout=WITHIN_S)) == 3
        if breaks:
            clients[0]._transport.close()  # type: ignore[union-attr]
        else:
            await said(journal, heard(4))
        wanted = [heard(n) for n in range(1, 4 if breaks else 5)]
        assert [(await anext(following)).fact for _ in wanted] == wanted
    await following.aclose()
    await other.close()


async def test_invalid_arguments_are_refused(nats_url: str, journal: NatsJournal) -> None:
    for how in ({"kinds": ["no_such_kind"]}, {"durable": "a b"}, {"since": datetime(2026, 1, 1)}):
        with pytest.raises(UsageError):
            await taken(nats_url, 1, **how)
    await said(journal, heard(0))
    await taken(nats_url, 1, durable="app")
    with pytest.raises(UsageError, match="follows other kinds"):
        await taken(nats_url, 1, durable="app", kinds=["canary_failed"])


async def test_an_unreachable_broker_or_one_without_a_stream_is_an_error(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CannotFollow):
        await taken(nats_url, 1)
    monkeypatch.setattr(module, "CONNECT_S", 0.5)
    with pytest.raises(CannotFollow, match="does not respond"):
        await taken("nats://127.0.0.1:1", 1)


async def recreate(url: str, journal: NatsJournal, *facts: Any) -> None:
    """Delete the stream, and create another one with these facts."""
    client = await nats.connect(url)
    stream = client.jetstream()
    config = (await stream.stream_info("FLEET")).config
    await stream.delete_stream("FLEET")
    await stream.add_stream(config)
    await said(journal, *facts)
    await client.close()


@pytest.mark.slow
@pytest.mark.parametrize("durable", ["", "app"])
@pytest.mark.parametrize("others", [1, 9], ids=["with fewer events", "with more events"])
async def test_following_stops_at_a_recreated_stream(
    nats_url: str, journal: NatsJournal, durable: str, others: int
) -> None:
    """Its sequences denote other events: a reader that continued would miss some without noticing."""
    await said(journal, *(heard(n) for n in range(3)))
    following = follow(nats_url, durable=durable)
    async with asyncio.timeout(WITHIN_S):
        assert [(await anext(following)).fact for _ in range(3)] == [heard(n) for n in range(3)]
        coming = asyncio.ensure_future(anext(following))
        await recreate(nats_url, journal, *(failed(f"w{n}") for n in range(others)))
        with pytest.raises(CannotFollow, match=r"recreated|ends at"):
            await coming


@pytest.mark.parametrize("taken_there", [0, 9], ids=["nothing", "everything"])
async def test_following_a_recreated_stream_stops_also_for_a_durable_name_that_has_read_from_it(
    nats_url: str, journal: NatsJournal, taken_there: int
) -> None:
    await said(journal, *(heard(n) for n in range(3)))
    following, client = follow(nats_url, durable="app"), await nats.connect(nats_url)
    stream = client.jetstream()
    async with asyncio.timeout(WITHIN_S):
        for _ in range(3):
            await anext(following)
        config = (await stream.consumer_info("FLEET", "app")).config
        await recreate(nats_url, journal, *(failed(f"w{n}") for n in range(9)))
        await stream.add_consumer("FLEET", config)
        other = await stream.pull_subscribe_bind(consumer="app", stream="FLEET")
        for _ in range(taken_there):
            (message,) = await other.fetch(1)
            await message.ack_sync()
        with pytest.raises(CannotFollow, match=r"recreated|ends at"):
            await anext(following)
    await client.close()
