"""A deleted stream: reported, waited for, and never silently created again."""

import shutil
from pathlib import Path

import nats
import pytest
from nats_world import Broker, absorbed, drain, read_all
from test_journal_damage import Eventually, power_cut, spoken

from events import subjects
from events.journal.acknowledged import remembered
from events.journal.nats import NatsJournal
from events.journal.port import JournalGone, JournalUnavailable

pytestmark = pytest.mark.servers


async def delete_stream(url: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().delete_stream(subjects.STREAM)
    await client.close()


async def test_a_process_that_may_not_create_the_stream_waits_for_one_that_may(
    nats_url: str, tmp_path: Path, eventually: Eventually
) -> None:
    worker = await NatsJournal.connect(nats_url, "worker:w1", tmp_path / "w1", make=False)
    worker.observe(drain(1))
    with pytest.raises(JournalGone, match="no stream FLEET at nats://"):
        await worker.last_seq()
    controller = await NatsJournal.connect(nats_url, "controller:c1", tmp_path / "c1")
    await eventually(lambda: worker.spool_depth == 0)
    assert [event.fact for event in await read_all(controller)] == [drain(1)]
    assert worker.fault is None
    await worker.close()
    await controller.close()


async def test_a_deleted_stream_is_noticed_and_not_created_again(
    nats_url: str, tmp_path: Path, eventually: Eventually
) -> None:
    journal = await spoken(nats_url, 3, tmp_path / "spool")
    await delete_stream(nats_url)
    journal.observe(drain(3))
    await eventually(lambda: isinstance(journal.fault, JournalGone))
    with pytest.raises(JournalUnavailable, match="from a backup"):  # not an error that ends a controller
        await journal.append([absorbed(1)], through=0, after=0)
    assert journal.spool_depth == 1
    with pytest.raises(JournalGone):
        await journal.usage()
    await journal.close()
    (seen,) = remembered(tmp_path).values()
    assert seen.seq == 3
    again = await NatsJournal.connect(
        nats_url, "controller:c1", tmp_path / "spool"
    )  # it remembers the old stream, so it creates none
    stranger = await NatsJournal.connect(nats_url, "reader", None, make=False)
    for each in (again, stranger):
        with pytest.raises(JournalGone):
            await each.last_seq()
        await each.close()


async def test_reading_continues_on_a_restored_stream(
    broker: Broker, tmp_path: Path, eventually: Eventually
) -> None:
    journal = await spoken(broker.url, 5, tmp_path / "spool")
    shutil.copytree(broker.store, tmp_path / "backup")
    await delete_stream(broker.url)
    journal.observe(drain(5))
    await eventually(lambda: isinstance(journal.fault, JournalGone))
    await power_cut(broker, tmp_path / "backup")
    await eventually(lambda: journal.spool_depth == 0)
    assert journal.fault is None
    assert [event.fact for event in await read_all(journal)] == [drain(n) for n in range(6)]
    await journal.close()
