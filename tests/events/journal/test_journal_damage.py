"""The journal when the broker has lost acknowledged events, is full, or is another one."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats_world import Broker, absorbed, drain, folded, make_stream, read_all
from structlog.testing import capture_logs
from waits import turns

from controller.adapters.embedded.free_port import free_port
from controller.adapters.embedded.nats import nats_binary, start_nats
from controller.adapters.embedded.server import spawn
from events import subjects
from events.journal.nats import NatsJournal
from events.journal.port import JournalChanged, JournalUnavailable
from events.journal.stream import StreamRefused, differences, stream_config

pytestmark = pytest.mark.servers
Eventually = Callable[..., Awaitable[None]]


# --- power cuts, damage, another stream -----------------------------------------------------------------------------


async def spoken(url: str, count: int, spool: Path | None = None) -> NatsJournal:
    journal = await NatsJournal.connect(url, "worker:w1", spool)
    before = journal.counters.observed
    for number in range(before, before + count):
        journal.observe(drain(number))
    assert await journal.flush(10)
    return journal


async def test_an_acknowledged_event_is_already_on_disk(broker: Broker, tmp_path: Path) -> None:
    """A copy of the files, made when the acknowledgement arrived, holds everything acknowledged."""
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
    """Restart the broker with the files of an earlier moment."""
    await broker.server.kill()
    shutil.rmtree(broker.store)
    shutil.copytree(files, broker.store)
    await broker.start()


@pytest.mark.parametrize("refilled", [False, True])
async def test_a_power_failure_that_loses_acknowledged_facts_is_noticed_by_all_their_readers(
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
    if refilled:  # another publisher's facts take the positions of the lost ones before we reconnect
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


@pytest.mark.slow
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
        async with asyncio.timeout(20):
            async for _ in reader.read(30):
                pass
    await reader.close()


async def test_an_event_acknowledged_during_the_check_is_no_loss(nats_url: str) -> None:
    journal = await NatsJournal.connect(nats_url, "controller:c1")

    async def examine() -> None:
        for _ in range(60):
            await journal._examine()

    examining, after = asyncio.create_task(examine()), 0
    while not examining.done():
        after = await journal.append([absorbed(after + 1)], through=0, after=after)
        await turns()
    examining.result()
    assert journal.fault is None and after > 10
    await journal.close()


async def test_a_recreated_stream_is_refused(nats_url: str, eventually: Eventually) -> None:
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
    with pytest.raises(JournalChanged, match="recreated"):
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
    assert (await journal.usage()).bytes_max == 10_000_000
    await journal.close()


async def test_a_full_stream_keeps_what_it_has_and_the_spool_keeps_the_rest(
    nats_url: str, tmp_path: Path, eventually: Eventually
) -> None:
    await make_stream(nats_url, max_bytes=20_000)
    client = await nats.connect(nats_url)
    journal = await NatsJournal.connect(nats_url, "worker:w1", tmp_path / "spool")
    with capture_logs() as logs:
        for number in range(100):
            journal.observe(drain(number))
        await eventually(lambda: any(line["event"] == "journal_refuses" for line in logs))
    assert journal.counters.dropped == 0
    config = json.dumps({**stream_config(1), "max_bytes": -1}).encode()
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
    assert differences(stream_config(3), 3) == []
    assert differences(stream_config(1), 3) == ["it has 1 replicas, not 3"]


async def test_a_broker_without_jetstream_is_named_in_the_error(tmp_path: Path) -> None:
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
