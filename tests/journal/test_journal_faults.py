"""The journal when the broker dies, comes back, lies, or is another one."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats_world import Broker, Wire, absorbed, drain, folded, make_stream, read_all

from controller.adapters.embedded import Server, nats_binary, start_nats
from controller.adapters.embedded_server import free_port, spawn
from events import subjects
from events.fact import Recorded
from events.journal import publisher as publisher_module
from events.journal.nats import NatsJournal
from events.journal.port import JournalChanged, JournalUnavailable
from events.journal.stream import StreamRefused, differences, wanted

pytestmark = pytest.mark.servers
Eventually = Callable[..., Awaitable[None]]


@pytest.fixture
async def broker(own_nats: Server) -> Any:
    made = Broker(own_nats)
    yield made
    await made.server.kill()


# --- killed and restarted --------------------------------------------------------------------------------------------


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
            await asyncio.sleep(0.002)
        return said

    async def follow() -> None:
        async for batch in reader.read(0):
            followed.extend(batch)

    following = asyncio.create_task(follow())
    speaking = [asyncio.create_task(speak(journal)) for journal in journals]
    for _ in range(20):
        seen = len(followed)
        await broker.restart()
        await eventually(lambda seen=seen: len(followed) > seen, 20)  # it goes on each time
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
    assert len({event.id for event in events}) == len(events)  # the ids' window has held: none is there twice
    await eventually(lambda: len(followed) >= len(events), 20)
    assert followed == events
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    for journal in (*journals, reader):
        await journal.close()


async def test_facts_said_while_the_broker_is_away_arrive_once_and_in_order(
    broker: Broker, tmp_path: Path, eventually: Eventually
) -> None:
    journal = await NatsJournal.connect(broker.url, "worker:w1", tmp_path / "spool")
    await broker.server.kill()
    await eventually(lambda: not journal.connected)
    for number in range(500):
        journal.observe(drain(number))
    assert await journal.flush(5)  # safely on the disk is enough
    assert journal.spool_depth == 500
    with pytest.raises(JournalUnavailable):
        await journal.append([absorbed(1)], through=0, after=0)
    with pytest.raises(JournalUnavailable):
        await journal.last_seq()
    await broker.start()
    await eventually(lambda: journal.spool_depth == 0, 20)
    assert [event.source_number for event in await read_all(journal)] == list(range(1, 501))
    await journal.close()


async def test_a_journal_may_begin_before_its_broker(
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
    await dead._connection.close()
    successor = await NatsJournal.connect(broker.url, "worker:w1", tmp_path / "spool", wait_s=0.05)
    ids.append(successor.observe(drain(40)))
    await broker.start()
    await eventually(lambda: successor.spool_depth == 0, 20)
    events = await read_all(successor)
    assert [event.id for event in events] == ids
    assert [event.source_number for event in events] == [*range(1, 41), 1]
    assert {event.source for event in events[:40]} == {dead.source}
    assert events[40].source == successor.source
    assert successor.counters.inherited == 40
    await successor.close()
    assert not list((tmp_path / "spool").glob("*.spool"))


async def test_what_does_not_fit_is_counted_and_the_gap_shows(
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


async def test_a_connection_cut_anywhere_in_the_sending_loses_and_doubles_nothing(
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


async def test_a_broker_that_swallows_everything_is_given_up_and_found_again(
    broker: Broker, tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "ACK_DEADLINE_S", 0.2)
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


async def test_a_fact_that_was_overtaken_is_said_again_under_a_new_number(nats_url: str) -> None:
    """The first of two was refused for a moment, the second stored: a fold would drop the first for good."""
    journal = await NatsJournal.connect(nats_url, "worker:w1")
    journal.observe(drain(1))
    journal.observe(drain(2))
    assert await journal.flush(5)
    letter = journal._letter(drain(3), "", "")
    late = journal._letter(drain(4), "", "")
    for each in (late, letter):  # the wrong way round
        journal._publisher.add(each)
        assert await journal.flush(5)
    assert await journal.flush(5)
    events = await read_all(journal)
    kept = folded(events)[journal.source]
    assert sorted(event.fact.by for event in kept) == [f"fact {n}" for n in (1, 2, 3, 4)]  # type: ignore[attr-defined]
    assert journal.counters.renumbered == 1
    await journal.close()


# --- the reader ------------------------------------------------------------------------------------------------------


async def test_a_reader_whose_consumer_is_forgotten_makes_another(
    nats_url: str, eventually: Eventually
) -> None:
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
    client = await nats.connect(nats_url)
    for consumer in await client.jetstream().consumers_info(subjects.STREAM):
        await client.jetstream().delete_consumer(subjects.STREAM, consumer.name)
    await client.close()
    journal.observe(drain(2))
    await eventually(lambda: seen == [1, 2], 15)
    assert other.counters.reads_resumed >= 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await journal.close()
    await other.close()


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
            await asyncio.sleep(0.001)
    assert seen == 12_000
    await journal.close()


# --- power cuts, damage, another stream -----------------------------------------------------------------------------


async def spoken(url: str, count: int, spool: Path | None = None) -> NatsJournal:
    journal = await NatsJournal.connect(url, "worker:w1", spool)
    before = journal.counters.observed
    for number in range(before, before + count):
        journal.observe(drain(number))
    assert await journal.flush(10)
    return journal


async def test_what_is_acknowledged_is_in_the_store_at_that_moment(broker: Broker, tmp_path: Path) -> None:
    """A copy of the files, made when the acknowledgement came in, holds everything acknowledged."""
    journal = await NatsJournal.connect(broker.url, "worker:w1")
    for count in range(1, 6):
        journal.observe(drain(count))
        assert await journal.flush(5)
        await journal.append([absorbed(2 * count - 1), absorbed(2 * count)], through=0, after=3 * count - 3)
        copy = tmp_path / f"copy-{count}"
        shutil.copytree(broker.server.directory, copy)
        other = await start_nats(copy)
        reader = await NatsJournal.connect(other.url, "frontend:f1")
        assert len(await read_all(reader)) == 3 * count
        await reader.close()
        await other.kill()
    await journal.close()


async def power_cut(broker: Broker, files: Path) -> None:
    """Bring the broker back with the files as they were at an earlier moment."""
    await broker.server.kill()
    shutil.rmtree(broker.store)
    shutil.copytree(files, broker.store)
    await broker.start()


@pytest.mark.parametrize("refilled", [False, True])
async def test_a_power_cut_that_loses_acknowledged_facts_is_noticed_by_all_who_had_seen_them(
    broker: Broker, tmp_path: Path, eventually: Eventually, refilled: bool
) -> None:
    journal = await spoken(broker.url, 5, tmp_path / "spool")
    shutil.copytree(broker.store, tmp_path / "earlier")
    reader = await NatsJournal.connect(broker.url, "frontend:f1")
    seen: list[int] = []

    async def follow() -> None:
        async for batch in reader.read(0):
            seen.extend(event.seq for event in batch)

    task = asyncio.create_task(follow())
    for number in range(5):
        journal.observe(drain(number))
    assert await journal.flush(5)
    await eventually(lambda: len(seen) == 10)
    await broker.server.kill()
    if refilled:  # somebody else's facts take the places of the lost ones before we are back
        await refill(tmp_path / "earlier")
    await power_cut(broker, tmp_path / "earlier")
    with pytest.raises(JournalChanged, match="is now" if refilled else "ends at 5"):
        await asyncio.wait_for(task, 20)
    await eventually(lambda: journal.fault is not None, 20)
    journal.observe(drain(99))
    assert journal.spool_depth == 1
    with pytest.raises(JournalChanged):
        await journal.append([absorbed(1)], through=0, after=0)
    await journal.close()
    with pytest.raises(JournalChanged, match="acknowledged"):  # and by the next process on the same directory
        await NatsJournal.connect(broker.url, "worker:w1", tmp_path / "spool")
    await reader.close()


async def refill(files: Path) -> None:
    server = await start_nats(files.parent / "elsewhere")
    await server.kill()
    shutil.rmtree(server.directory / "store")
    shutil.copytree(files, server.directory / "store")
    server = await start_nats(server.directory)
    stranger = await NatsJournal.connect(server.url, "worker:w9")
    for number in range(20):
        stranger.observe(drain(number, "w9"))
    assert await stranger.flush(5)
    await stranger.close()
    await server.stop()
    shutil.rmtree(files)
    shutil.copytree(server.directory / "store", files)


@pytest.mark.parametrize("damage", ["flip", "flip-early", "truncate", "zero"])
async def test_a_damaged_last_block_is_noticed(broker: Broker, tmp_path: Path, damage: str) -> None:
    journal = await spoken(broker.url, 30, tmp_path / "spool")
    events = await read_all(journal)
    await journal.close()
    await broker.server.kill()
    (block,) = broker.store.rglob("1.blk")
    content = bytearray(block.read_bytes())
    match damage:
        case "flip":
            content[-60] ^= 1
        case "flip-early":
            content[len(content) // 3] ^= 16
        case "truncate":
            del content[-200:]
        case "zero":
            content[-512:] = bytes(512)
    block.write_bytes(bytes(content))
    await broker.start()
    with pytest.raises(JournalChanged, match="acknowledged"):
        await NatsJournal.connect(broker.url, "worker:w1", tmp_path / "spool")
    reader = await NatsJournal.connect(broker.url, "frontend:f1")
    left = await read_all(reader)
    assert left == events[: len(left)]  # what is left is unaltered
    with pytest.raises(JournalChanged, match="30 has been read"):
        async with asyncio.timeout(10):
            async for _ in reader.read(30):
                pass
    await reader.close()


async def test_a_stream_made_anew_is_refused(nats_url: str, eventually: Eventually) -> None:
    journal = await spoken(nats_url, 3)
    reader = await NatsJournal.connect(nats_url, "frontend:f1")
    seen: list[int] = []

    async def follow() -> None:
        async for batch in reader.read(0):
            seen.extend(event.seq for event in batch)

    task = asyncio.create_task(follow())
    await eventually(lambda: len(seen) == 3)
    client = await nats.connect(nats_url)
    await client.jetstream().delete_stream(subjects.STREAM)
    await client.close()
    await make_stream(nats_url)
    with pytest.raises(JournalChanged, match="made anew"):
        await asyncio.wait_for(task, 20)
    await journal.close()
    await reader.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"storage": "memory"}, "storage is 'memory'"),
        ({"discard": "old"}, "discard is 'old'"),
        ({"allow_atomic": False}, r"allow_atomic is (None|False).*nats-server 2.12"),
        ({"deny_purge": False}, "deny_purge is False"),
        ({"subjects": ["fleet.>"]}, "its subjects are"),
        ({"no_ack": True}, "no_ack is set"),
    ],
)
async def test_a_stream_that_breaks_a_promise_is_refused_with_the_reason(
    nats_url: str, change: dict[str, Any], reason: str
) -> None:
    await make_stream(nats_url, **change)
    with pytest.raises(StreamRefused, match=reason):
        await NatsJournal.connect(nats_url, "worker:w1")


async def test_limits_are_the_operator_s_choice(nats_url: str) -> None:
    await make_stream(nats_url, max_bytes=10_000_000, max_age=10**15)
    journal = await NatsJournal.connect(nats_url, "worker:w1")
    assert (await journal.stream_state()).bytes_max == 10_000_000
    await journal.close()


async def test_a_full_stream_keeps_what_it_has_and_the_spool_keeps_the_rest(
    nats_url: str, tmp_path: Path, eventually: Eventually
) -> None:
    await make_stream(nats_url, max_bytes=20_000)
    client = await nats.connect(nats_url)
    journal = await NatsJournal.connect(nats_url, "worker:w1", tmp_path / "spool")
    for number in range(100):
        journal.observe(drain(number))
    await eventually(lambda: journal.counters.refused > 0)
    assert journal.counters.dropped == 0
    config = json.dumps({**wanted(1), "max_bytes": -1}).encode()
    await client.request(f"$JS.API.STREAM.UPDATE.{subjects.STREAM}", config)
    await eventually(lambda: journal.spool_depth == 0, 20)
    kept = folded(await read_all(journal))[journal.source]
    assert {event.fact.by for event in kept} == {f"fact {n}" for n in range(100)}  # type: ignore[attr-defined]
    await client.close()
    await journal.close()


async def test_purging_and_deleting_are_refused(nats_url: str) -> None:
    journal = await spoken(nats_url, 3)
    client = await nats.connect(nats_url)
    for verb, body in (("PURGE", b""), ("MSG.DELETE", b'{"seq": 2}')):
        answer = await client.request(f"$JS.API.STREAM.{verb}.{subjects.STREAM}", body)
        assert "error" in json.loads(answer.data)
    assert len(await read_all(journal)) == 3
    await client.close()
    await journal.close()


def test_too_few_replicas_are_a_reason() -> None:
    assert differences(wanted(3), 3) == []
    assert differences(wanted(1), 3) == ["it has 1 replicas, not 3"]


async def test_a_broker_without_jetstream_is_said_to_be_one(tmp_path: Path) -> None:
    port = free_port()
    command = [str(nats_binary()), "-a", "127.0.0.1", "-p", str(port)]
    process = await spawn(command, tmp_path, tmp_path / "log")
    journal = await NatsJournal.connect(f"nats://127.0.0.1:{port}", "worker:w1")
    journal.observe(drain(1))
    with pytest.raises(JournalUnavailable, match="without JetStream"):
        await journal.last_seq()
    assert journal.spool_depth == 1
    await journal.close()
    process.kill()
    process.wait()
