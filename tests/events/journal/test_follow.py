"""`follow` yields what was said, typed and in order, and goes on where a program of that name has stopped."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from controller.adapters.embedded.servers import EmbeddedServer, start_nats
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
    """What is lost comes again soon."""
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
    """Follow until so many events were taken, and leave; the last one counts as taken only if the loop asked for one more."""
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


async def test_it_begins_where_it_is_told_to(nats_url: str, journal: NatsJournal) -> None:
    await said(journal, *(heard(n) for n in range(3)))
    (third,) = await taken(nats_url, 1, since=3)
    assert third.fact == heard(2)
    (since,) = await taken(nats_url, 1, since=third.at)
    assert since.at >= third.at and since.seq <= 3
    following = asyncio.create_task(taken(nats_url, 1, since="now"))
    for number in range(100, 200):  # until it is there
        await said(journal, heard(number))
        await asyncio.wait({following}, timeout=0.05)
        if following.done():
            break
    assert (await following)[0].seq > 3


async def test_a_name_goes_on_with_the_event_that_it_was_at(nats_url: str, journal: NatsJournal) -> None:
    await said(journal, *(heard(n) for n in range(6)))
    first = await taken(nats_url, 3, durable="app")
    second = await taken(nats_url, 4, durable="app")
    assert [event.fact for event in first] == [heard(0), heard(1), heard(2)]
    assert [event.fact for event in second] == [heard(2), heard(3), heard(4), heard(5)], (
        "it had not asked for the next"
    )
    assert [event.fact for event in await taken(nats_url, 1, durable="another")] == [heard(0)]


async def test_who_leaves_in_good_order_leaves_what_he_was_at_to_the_next_at_once(
    nats_url: str, journal: NatsJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ACK_WAIT_S", 10 * WITHIN_S)
    await said(journal, heard(0), heard(1))
    for wanted in ([heard(0)], [heard(0), heard(1)]):
        assert [event.fact for event in await taken(nats_url, len(wanted), durable="app")] == wanted


async def test_a_name_may_follow_other_kinds_from_its_place_on(nats_url: str, journal: NatsJournal) -> None:
    await said(journal, heard(0), failed("w0"), heard(1), failed("w1"), heard(2))
    first = await taken(nats_url, 2, durable="app", kinds=[WorkerHeard])
    assert [event.pending for event in first] == [2, 1]
    how = {"durable": "app", "kinds": [WorkerHeard, CanaryFailed], "may_change_kinds": True}
    second = await taken(nats_url, 3, **how)
    assert [event.fact for event in second] == [heard(1), failed("w1"), heard(2)]


async def test_what_takes_long_does_not_come_twice(nats_url: str, journal: NatsJournal) -> None:
    await said(journal, heard(0), heard(1))
    found = []
    following = follow(nats_url, durable="slow")
    async with asyncio.timeout(WITHIN_S):
        async for event in following:
            found.append(event.fact)
            await asyncio.sleep(2 * module.ACK_WAIT_S)
            if len(found) == 2:
                break
    await following.aclose()
    assert found == [heard(0), heard(1)]


async def test_what_is_no_event_is_stepped_over(nats_url: str, journal: NatsJournal) -> None:
    await said(journal, heard(0))
    client = await nats.connect(nats_url)
    await client.jetstream().publish("fleet.observed.worker.w1.worker_heard", b"no event")
    await client.close()
    await said(journal, heard(1))
    for how in ({}, {"durable": "app"}):
        assert [event.fact for event in await taken(nats_url, 2, **how)] == [heard(0), heard(1)]


async def test_a_reader_whom_the_broker_has_forgotten_goes_on(nats_url: str, journal: NatsJournal) -> None:
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


@pytest.mark.parametrize("durable", ["", "app"])
async def test_nothing_is_left_out_when_the_broker_dies_in_the_middle(
    own_nats: EmbeddedServer, journal: NatsJournal, durable: str
) -> None:
    """Where nothing is acknowledged the broker takes what it has sent for delivered."""
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
async def test_what_got_lost_on_its_way_is_read_again(
    nats_url: str, journal: NatsJournal, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else takes what was meant for this reader: the broker holds it for delivered, as what a broken connection lost."""
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
        while not (consumers := await stream.consumers_info("FLEET")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
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


async def test_what_makes_no_sense_is_said(nats_url: str, journal: NatsJournal) -> None:
    for how in ({"kinds": ["no_such_kind"]}, {"durable": "a b"}, {"since": datetime(2026, 1, 1)}):
        with pytest.raises(UsageError):
            await taken(nats_url, 1, **how)
    await said(journal, heard(0))
    await taken(nats_url, 1, durable="app")
    with pytest.raises(UsageError, match="follows other kinds"):
        await taken(nats_url, 1, durable="app", kinds=["canary_failed"])


async def test_a_broker_that_is_not_there_or_has_no_stream_is_said(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CannotFollow):
        await taken(nats_url, 1)
    monkeypatch.setattr(module, "CONNECT_S", 0.5)
    with pytest.raises(CannotFollow, match="does not answer"):
        await taken("nats://127.0.0.1:1", 1)


async def made_anew(url: str, journal: NatsJournal, *facts: Any) -> None:
    """Delete the stream, and make another one that has these facts."""
    client = await nats.connect(url)
    stream = client.jetstream()
    config = (await stream.stream_info("FLEET")).config
    await stream.delete_stream("FLEET")
    await stream.add_stream(config)
    await said(journal, *facts)
    await client.close()


@pytest.mark.parametrize("durable", ["", "app"])
@pytest.mark.parametrize("others", [1, 9], ids=["with fewer events", "with more events"])
async def test_a_stream_that_was_made_anew_is_not_gone_on_with(
    nats_url: str, journal: NatsJournal, durable: str, others: int
) -> None:
    """Its numbers mean other events: whoever went on would leave some out, and not know it."""
    await said(journal, *(heard(n) for n in range(3)))
    following = follow(nats_url, durable=durable)
    async with asyncio.timeout(WITHIN_S):
        assert [(await anext(following)).fact for _ in range(3)] == [heard(n) for n in range(3)]
        coming = asyncio.ensure_future(anext(following))
        await made_anew(nats_url, journal, *(failed(f"w{n}") for n in range(others)))
        with pytest.raises(CannotFollow, match="another one"):
            await coming


@pytest.mark.parametrize("taken_there", [0, 9], ids=["nothing", "everything"])
async def test_nor_under_a_name_by_which_somebody_has_taken_something_of_it(
    nats_url: str, journal: NatsJournal, taken_there: int
) -> None:
    await said(journal, *(heard(n) for n in range(3)))
    following, client = follow(nats_url, durable="app"), await nats.connect(nats_url)
    stream = client.jetstream()
    async with asyncio.timeout(WITHIN_S):
        for _ in range(3):
            await anext(following)
        config = (await stream.consumer_info("FLEET", "app")).config
        await made_anew(nats_url, journal, *(failed(f"w{n}") for n in range(9)))
        await stream.add_consumer("FLEET", config)
        other = await stream.pull_subscribe_bind(consumer="app", stream="FLEET")
        for _ in range(taken_there):
            (message,) = await other.fetch(1)
            await message.ack_sync()
        with pytest.raises(CannotFollow, match="another one"):
            await anext(following)
    await client.close()
