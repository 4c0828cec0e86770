"""A journal that does not match its data directory: `up` refuses until an operator accepts it."""

from pathlib import Path
from typing import Any

import nats
import pytest
from fleet_history import History, publish
from store_databases import execute
from waits import until

from controller.adapters.postgres import migrate
from controller.adapters.postgres.store import PostgresStore
from controller.processes.fleet_dir import FleetDir
from controller.processes.journal_recovery import JournalLost, JournalWatch, accept, open_journal, refuse_lost
from controller.processes.supervised_servers import FleetDatabase
from controller.runtime.projection.projector import Projector
from events import subjects
from events.journal.acknowledged import remembered
from events.journal.nats import NatsJournal
from events.journal.stream import StreamState
from events.observations import DrainRequested

pytestmark = pytest.mark.servers


async def delete_stream(url: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().delete_stream(subjects.STREAM)
    await client.close()


async def lived(url: str, data: Path) -> None:
    """Leave the files of a worker that has published a fact."""
    journal = await NatsJournal.connect(url, "worker:w1", data / "spool" / "worker-w1")
    for n in range(3):
        journal.observe(DrainRequested(worker="w1", instance="i1", by=f"fact {n}"))
    assert await journal.flush(10)
    await journal.close()


async def test_a_new_directory_creates_the_stream(nats_url: str, tmp_path: Path) -> None:
    journal = await open_journal(nats_url, tmp_path / "spool")
    assert await journal.last_seq() == 0
    await refuse_lost(journal, tmp_path / "spool", None)
    await journal.close()


async def test_a_lost_journal_is_refused_until_it_is_accepted(
    nats_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await lived(nats_url, tmp_path)
    journal = await open_journal(nats_url, tmp_path / "spool")
    await journal.close()
    await delete_stream(nats_url)
    for _ in range(2):  # the first attempt must not create a journal
        with pytest.raises(
            JournalLost, match=r"the stream is missing, although its event 3 .*--accept-journal"
        ):
            await open_journal(nats_url, tmp_path / "spool")
    await accept(
        nats_url, tmp_path / "spool", FleetDatabase(FleetDir(tmp_path), "", lambda server: None), None
    )
    assert "accepted the journal, which holds 0 events" in capsys.readouterr().out
    assert not remembered(tmp_path / "spool")
    journal = await open_journal(nats_url, tmp_path / "spool")
    await journal.close()
    await lived(nats_url, tmp_path)
    assert [event.seq for event in remembered(tmp_path / "spool").values()] == [3]


@pytest.mark.parametrize("source", ["worker-w1", "supervisor"])
async def test_a_journal_that_lacks_acknowledged_events_is_refused(
    nats_url: str, tmp_path: Path, source: str
) -> None:
    await lived(nats_url, tmp_path)
    ahead = (
        tmp_path / "spool" / source / "acknowledged.json"
    )  # as if the broker's directory were an older backup
    ahead.parent.mkdir(exist_ok=True)
    ahead.write_text('{"seq": 99, "id": "x"}')
    with pytest.raises(JournalLost, match="the stream ends at 3, but the broker had acknowledged event 99"):
        await open_journal(nats_url, tmp_path / "spool")
    await accept(
        nats_url, tmp_path / "spool", FleetDatabase(FleetDir(tmp_path), "", lambda server: None), None
    )
    assert ahead.with_suffix(".before").exists()
    journal = await open_journal(nats_url, tmp_path / "spool")
    assert await journal.last_seq() == 3
    await journal.close()


@pytest.mark.slow
async def test_a_database_of_another_journal_is_refused_and_its_rows_are_set_aside(
    nats_url: str, database_url: str, tmp_path: Path
) -> None:
    old, new = History().start().corruption(), History().start(2)
    journal = await open_journal(nats_url, tmp_path / "spool")
    await publish(nats_url, old.events)
    store = PostgresStore(database_url)
    await Projector(journal, store).catch_up(len(old.events))
    place = await migrate.place(database_url)
    assert place == (len(old.events), old.events[-1].id)
    await refuse_lost(journal, tmp_path / "spool", place)
    await journal.close()
    await delete_stream(nats_url)
    journal = await open_journal(nats_url, tmp_path / "spool")
    await publish(nats_url, new.events)
    with pytest.raises(
        JournalLost, match=f"the database has folded event {len(old.events)}, but the stream ends"
    ):
        await refuse_lost(journal, tmp_path / "spool", place)
    database = FleetDatabase(FleetDir(tmp_path), database_url, lambda server: None)
    await accept(nats_url, tmp_path / "spool", database, place)
    schemas = await execute(
        database_url, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'holdfast_before_%'"
    )
    (kept,) = await execute(database_url, f"SELECT count(*) FROM {schemas[0][0]}.fleet_events")
    assert kept[0] == len(old.events)
    assert await database.migrate() is None
    await Projector(journal, store).catch_up(len(new.events))
    assert await database.migrate() == (len(new.events), new.events[-1].id)
    await store.close()
    await journal.close()


class CountingJournal(NatsJournal):
    """A journal that counts how often its stream's state was read."""

    looks = 0

    async def stream_state(self) -> StreamState:
        found = await super().stream_state()
        self.looks += 1
        return found


async def test_the_console_reports_a_lost_stream_and_a_different_one(
    nats_url: str, tmp_path: Path, eventually: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = await CountingJournal.connect(nats_url, "supervisor:s", tmp_path / "spool")
    assert isinstance(journal, CountingJournal)
    watch = JournalWatch(journal, look_every_s=0.01)
    said = ""

    async def says(words: str) -> bool:
        nonlocal said
        said += "".join(capsys.readouterr())
        return words in said

    await until(lambda: journal.looks)
    await delete_stream(nats_url)
    await eventually(lambda: says("the journal is gone; requests are still served"))
    other = await NatsJournal.connect(nats_url, "controller:c1")
    await eventually(lambda: says("the journal was replaced: its stream was recreated"))
    await watch.stop()
    await other.close()
    await journal.close()
