"""The journal when the broker restarts, the connection breaks, or this process is killed."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats
import pytest
from nats_world import Broker, Wire, absorbed, drain, folded, read_all
from roles import process
from structlog.testing import capture_logs

from events import codec, subjects
from events.fact import Recorded
from events.journal import broker, stream
from events.journal.broker import BrokerRefused
from events.journal.nats import NatsJournal
from events.journal.port import JournalUnavailable
from events.journal.spool import OutboxMessage, Spool

pytestmark = pytest.mark.servers
Eventually = Callable[..., Awaitable[None]]


# --- killed and restarted --------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_broker_killed_twenty_times_under_load_loses_nothing_and_doubles_nothing(
    broker: Broker, tmp_path: Path, eventually: Eventually
) -> None:
    journals = [
        await NatsJournal.connect(broker.url, f"worker:w{n}", tmp_path / f"spool-{n}") for n in range(3)
    ]
    reader = await NatsJournal.connect(broker.url, "frontend:f1")
    followed: list[Recorded] = []
    stop = asyncio.Event()

    async def speak(journal: NatsJournal) -> int:
        said = 0
        while not stop.is_set():
            for _ in range(10):
                said += 1
                journal.observe(drain(said))
            await asyncio.sleep(0.01)  # the rate of the facts
        return said

    async def follow() -> None:
        async for batch in reader.read(0):
            followed.extend(batch)

    following = asyncio.create_task(follow())
    speaking = [asyncio.create_task(speak(journal)) for journal in journals]
    for _ in range(20):
        seen = len(followed)
        await broker.restart()
        await eventually(lambda seen=seen: len(followed) > seen, 20)  # the follower continues each time
    stop.set()
    said = await asyncio.gather(*speaking)
    for journal in journals:
        await eventually(lambda journal=journal: journal.spool_depth == 0, 30)
    await eventually(lambda: reader.connected)
    events = await read_all(reader)
    kept = folded(events)
    for journal, count in zip(journals, said, strict=True):
        mine = kept[journal.source]
        assert [event.fact.by for event in mine] == [f"fact {n}" for n in range(1, count + 1)]  # type: ignore[attr-defined]
        assert journal.counters.dropped == 0 and journal.spool_depth == 0
    assert len({event.id for event in events}) == len(
        events
    )  # deduplication by id has worked: none is there twice
    await eventually(lambda: len(followed) >= len(events), 20)
    assert followed == events
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    for journal in (*journals, reader):
        await journal.close()


async def test_facts_published_while_the_broker_is_unreachable_arrive_once_and_in_order(
    broker: Broker, tmp_path: Path, eventually: Eventually
) -> None:
    journal = await NatsJournal.connect(broker.url, "worker:w1", tmp_path / "spool")
    await broker.server.kill()
    await eventually(lambda: not journal.connected)
    for number in range(500):
        journal.observe(drain(number))
    assert await journal.flush(5)  # synced to disk is enough
    assert journal.spool_depth == 500
    with pytest.raises(JournalUnavailable):
        await journal.append([absorbed(1)], through=0, after=0)
    with pytest.raises(JournalUnavailable):
        await journal.last_seq()
    await broker.start()
    await eventually(lambda: journal.spool_depth == 0, 20)
    assert [event.source_number for event in await read_all(journal)] == list(range(1, 501))
    await journal.close()


async def test_a_journal_may_start_before_its_broker(
    broker: Broker, tmp_path: Path, eventually: Eventually
) -> None:
    await broker.server.kill()
    journal = await NatsJournal.connect(broker.url, "worker:w1", tmp_path / "spool", wait_s=0.05)
    journal.observe(drain(1))
    await broker.start()
    await eventually(lambda: journal.spool_depth == 0, 20)
    assert len(await read_all(journal)) == 1
    await journal.close()


async def test_a_killed_process_s_facts_are_sent_first_by_its_successor_with_the_same_ids_and_numbers(
    broker: Broker, tmp_path: Path, eventually: Eventually
) -> None:
    await broker.server.kill()
    dead = await NatsJournal.connect(broker.url, "worker:w1", tmp_path / "spool", wait_s=0.05)
    ids = [dead.observe(drain(number)) for number in range(40)]
    for task in dead._tasks:
        task.cancel()
    await asyncio.gather(*dead._tasks, return_exceptions=True)
    dead._publisher.outbox._spool.close(empty=False)  # type: ignore[union-attr]  # as the kernel does
    await dead.connection.close()
    successor = await NatsJournal.connect(broker.url, "worker:w1", tmp_path / "spool", wait_s=0.05)
    ids.append(successor.observe(drain(40)))
    await broker.start()
    await eventually(lambda: successor.spool_depth == 0, 20)
    events = await read_all(successor)
    assert [event.id for event in events] == ids
    assert [event.source_number for event in events] == [*range(1, 41), 1]
    assert {event.source for event in events[:40]} == {dead.source}
    assert events[40].source == successor.source
    await successor.close()
    assert not list((tmp_path / "spool").glob("*.spool"))


async def test_spooled_facts_older_than_the_memory_of_folds_are_dropped_counted_and_logged(
    broker: Broker, tmp_path: Path, eventually: Eventually
) -> None:
    said = datetime.now(UTC)
    spool = Spool(tmp_path / "spool", "0190")
    for number, days in enumerate((8, 7.5, 6, 0), start=1):
        fact = drain(number)
        headers = codec.encode_headers(
            fact,
            id=codec.new_id(),
            source="worker:w1:0190",
            source_number=number,
            said_at=said - timedelta(days=days),
        )
        spool.put(OutboxMessage(number, subjects.subject(fact), headers, codec.encode_body(fact)))
    spool.close(empty=False)  # as the kernel does for a killed process
    journal = await NatsJournal.connect(broker.url, "worker:w1", tmp_path / "spool", wait_s=0.05)
    await eventually(lambda: journal.spool_depth == 0, 20)
    assert [event.source_number for event in await read_all(journal)] == [3, 4]
    assert journal.counters.dropped == 2
    await journal.close()
    assert not list((tmp_path / "spool").glob("*.spool"))


TALKER = """
import asyncio, structlog, sys
from pathlib import Path
from events.journal.nats import NatsJournal
from events.observations import DrainRequested

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))

async def main():
    journal = await NatsJournal.connect(sys.argv[1], "worker:w1", Path(sys.argv[2]))
    print(journal.source, flush=True)
    number = 0
    while True:
        for _ in range(7):
            number += 1
            journal.observe(DrainRequested(worker="w1", instance="i1", by=f"fact {number}"))
        print(number, flush=True)
        await asyncio.sleep(0.001)  # the rate of the facts

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("broker_dies", [False, True])
async def test_a_process_killed_while_publishing_loses_no_published_fact(
    broker: Broker, tmp_path: Path, eventually: Eventually, broker_dies: bool
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TALKER, broker.url, str(tmp_path / "spool")]
    async with process(*command, stdout=subprocess.PIPE, env=environment) as talker:
        assert talker.stdout is not None
        said = 0
        async with asyncio.timeout(30):
            source = (await talker.stdout.readline()).decode().strip()
            while said < 1000:
                said = int((await talker.stdout.readline()).split()[0])
                if broker_dies and said > 500 and broker.server.running:
                    await broker.server.kill()
        talker.send_signal(signal.SIGKILL)
        rest, _ = await talker.communicate()
        said = max([said, *map(int, rest.split())])
    if broker_dies:
        await broker.start()
    successor = await NatsJournal.connect(broker.url, "worker:w1", tmp_path / "spool")
    await eventually(lambda: successor.state is not None and successor.spool_depth == 0, 20)
    kept = folded(await read_all(successor))[source]
    assert [event.source_number for event in kept] == list(range(1, len(kept) + 1))
    assert len(kept) >= said
    await successor.close()


async def test_facts_that_do_not_fit_are_counted_and_leave_a_gap(
    broker: Broker, tmp_path: Path, eventually: Eventually
) -> None:
    journal = await NatsJournal.connect(broker.url, "worker:w1", tmp_path / "spool", spool_bytes_max=20_000)
    await broker.server.kill()
    await eventually(lambda: not journal.connected)
    for number in range(100):
        journal.observe(drain(number))
    assert journal.counters.dropped > 0
    assert journal.counters.dropped + journal.spool_depth == 100
    kept = journal.spool_depth
    await broker.start()
    await eventually(lambda: journal.spool_depth == 0, 20)
    journal.observe(drain(100))
    assert await journal.flush(10)
    assert [e.source_number for e in await read_all(journal)] == [*range(1, kept + 1), 101]
    await journal.close()


async def test_a_connection_broken_anywhere_while_sending_loses_and_doubles_nothing(
    broker: Broker, tmp_path: Path, eventually: Eventually
) -> None:
    wire = Wire(broker.server.port)
    journal = await NatsJournal.connect(await wire.start(), "worker:w1", tmp_path / "spool")
    said = 0
    for cut in range(300, 12_000, 900):
        wire.cut_after = cut
        for _ in range(70 if cut % 2 else 20):  # batches and single messages
            said += 1
            journal.observe(drain(said))
        await eventually(lambda: journal.spool_depth == 0, 20)
    events = await read_all(journal)
    assert [event.source_number for event in events] == list(range(1, said + 1))
    assert journal.counters.retried > 0
    await journal.close()
    await wire.close()


@pytest.mark.slow
async def test_a_connection_that_drops_everything_is_replaced(
    broker: Broker, tmp_path: Path, eventually: Eventually
) -> None:
    wire = Wire(broker.server.port)
    journal = await NatsJournal.connect(await wire.start(), "worker:w1", tmp_path / "spool")
    journal.observe(drain(0))
    assert await journal.flush(5)
    wire.swallow = True
    journal.observe(drain(1))
    await eventually(lambda: journal.counters.retried > 0)
    wire.swallow = False
    await eventually(lambda: journal.spool_depth == 0, 20)
    assert [event.source_number for event in await read_all(journal)] == [1, 2]
    await journal.close()
    await wire.close()


async def test_an_overtaken_fact_is_published_again_under_a_new_number(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two was refused for a moment and the second stored: a fold would drop the first for good."""
    journal = await NatsJournal.connect(nats_url, "worker:w1")
    journal.observe(drain(1))
    journal.observe(drain(2))
    assert await journal.flush(5)
    held: list[OutboxMessage] = []
    with monkeypatch.context() as patched:
        patched.setattr(journal._publisher, "add", held.append)
        journal.observe(drain(3))
        journal.observe(drain(4))
    with capture_logs() as logs:
        for each in reversed(held):
            journal._publisher.add(each)
            assert await journal.flush(5)
        assert await journal.flush(5)
    events = await read_all(journal)
    kept = folded(events)[journal.source]
    assert sorted(event.fact.by for event in kept) == [f"fact {n}" for n in (1, 2, 3, 4)]  # type: ignore[attr-defined]
    assert [line["event"] for line in logs if line["event"] == "fact_overtaken"] == ["fact_overtaken"]
    await journal.close()


# --- the reader ------------------------------------------------------------------------------------------------------


async def test_a_reader_without_its_consumer_creates_another(nats_url: str, eventually: Eventually) -> None:
    journal, other = (
        await NatsJournal.connect(nats_url, "worker:w1"),
        await NatsJournal.connect(nats_url, "f:f1"),
    )
    seen: list[int] = []

    async def follow() -> None:
        async for batch in other.read(0):
            seen.extend(event.seq for event in batch)

    task = asyncio.create_task(follow())
    journal.observe(drain(1))
    await eventually(lambda: seen == [1])
    with capture_logs() as logs:
        client = await nats.connect(nats_url)
        for consumer in await client.jetstream().consumers_info(subjects.STREAM):
            await client.jetstream().delete_consumer(subjects.STREAM, consumer.name)
        await client.close()
        journal.observe(drain(2))
        await eventually(lambda: seen == [1, 2], 15)
    assert any(line["event"] == "reader_resumes" for line in logs)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await journal.close()
    await other.close()


@pytest.mark.slow
async def test_a_reader_that_falls_behind_is_not_flooded(nats_url: str) -> None:
    journal = await NatsJournal.connect(nats_url, "worker:w1")
    for number in range(12_000):
        journal.observe(drain(number))
    assert await journal.flush(30)
    seen = 0
    async with asyncio.timeout(20):
        async for batch in journal.read(0, until=12_000):
            assert batch[0].seq == seen + 1
            seen = batch[-1].seq
            await asyncio.sleep(0.001)  # a slow reader
    assert seen == 12_000
    await journal.close()


async def test_a_failed_check_of_the_broker_is_retried(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    asked, ask = 0, broker.ask

    async def electing(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked < 4:
            raise BrokerRefused(10008, "JetStream system temporarily unavailable")
        return await ask(*arguments)

    monkeypatch.setattr(stream, "ask", electing)
    journal = await NatsJournal.connect(nats_url, "worker:w1")
    journal.observe(drain(1))
    await eventually(lambda: journal.spool_depth == 0, 20)
    assert journal.fault is None
    await journal.close()
