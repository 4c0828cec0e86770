"""Journals and databases of older releases, in tests/fixtures: read, verified, migrated and continued."""

import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from pathlib import Path

import asyncpg
import first_database
import nats
import pytest
from record import restore
from store_databases import execute, tamper

from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.postgres import migrate
from controller.adapters.postgres.link import HEAD
from controller.adapters.postgres.store import PostgresStore
from controller.deciders.fleet import OLDEST, Fleet, evolve
from controller.read_model import rows as projection
from controller.replay.verify import verify
from controller.runtime.projection.projector import Projector
from events import codec
from events.fact import Recorded, Skipped
from events.journal import messages
from events.journal.nats import NatsJournal
from events.order import Order

FIXTURES = Path(__file__).parents[1] / "fixtures"
RELEASES = sorted(path.name for path in FIXTURES.iterdir() if (path / "journal.snapshot").exists())
BYTES_MAX = 300_000
DECIDERS = {"0.1.0": 4, "0.3.0-deciders5": 5}  # the deciders version of each release's journal
EVERY_KIND = "0.3.0-deciders5"  # the pair that holds all kinds of its time
KINDS_THEN = FIXTURES / EVERY_KIND / "kinds.txt"


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> Path:
    """Return a folder of tests/fixtures."""
    return FIXTURES / str(request.param)


def written(release: Path) -> list[Recorded]:
    """Return the recorded journal, decoded by today's code."""
    found = []
    for line in gzip.decompress((release / "journal.jsonl.gz").read_bytes()).splitlines():
        message = json.loads(line)
        at, body = datetime.fromisoformat(message["time"]), json.dumps(message["body"]).encode()
        headers = messages.as_sent(message["headers"])
        found.append(messages.read(message["seq"], at, message["subject"].encode(), headers, body))
    quarantined = {place: event for event in found if (place := messages.quarantines(event)) is not None}
    return [
        messages.quarantined_event(event, quarantined[event.seq], event.id)
        if event.seq in quarantined
        else event
        for event in found
    ]


@pytest.fixture
async def journal(release: Path, own_nats: EmbeddedServer, tmp_path: Path) -> AsyncIterator[NatsJournal]:
    """Return the recorded journal on a real broker, every message with its sequence and time."""
    client = await nats.connect(own_nats.url)
    await restore(client, (release / "journal.snapshot").read_bytes())
    await client.close()
    made = await NatsJournal.connect(own_nats.url, "projector:test", wait_s=20)
    yield made
    await made.close()


@pytest.fixture
async def store(release: Path, empty_database_url: str) -> AsyncIterator[PostgresStore]:
    """Return the recorded database on a real server, migrated to today's version."""
    sql = gzip.decompress((release / "database.sql.gz").read_bytes()).decode()
    statements = "\n".join(
        line for line in sql.splitlines() if not line.startswith("\\")
    )  # psql's own commands
    connection = await asyncpg.connect(empty_database_url, timeout=10)
    await connection.execute(statements)
    await connection.close()
    await migrate.upgrade(empty_database_url)
    assert await migrate.version(empty_database_url) == HEAD
    made = PostgresStore(empty_database_url)
    yield made
    await made.close()


def test_a_journal_and_database_of_the_previous_release_are_kept() -> None:
    assert "0.1.0" in RELEASES
    for name in RELEASES:
        assert sum(path.stat().st_size for path in (FIXTURES / name).iterdir()) < BYTES_MAX


def test_every_message_decodes_and_folds(release: Path) -> None:
    events = written(release)
    order: Order[Fleet] = Order(evolve, Fleet())
    for event in events:
        order.take(event)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert {"request_migrated", "request_exposed", "breaker_closed", "incident_closed"} <= {
        event.fact.kind() for event in events
    }
    assert {"w0", "w1", "w2"} <= set(order.shown.workers) <= {"w0", "w1", "w2", "s0"}
    for event in events:  # today's code loses nothing of it
        if isinstance(event.fact, Skipped):
            assert event.fact.quarantined
            continue
        again = codec.decode_body(event.fact.kind(), codec.encode_body(event.fact))
        assert again == event.fact


def test_one_pair_holds_every_kind_of_its_time_and_no_kind_was_removed_since() -> None:
    kinds = set(KINDS_THEN.read_text().split())
    assert len(kinds) == 64
    assert kinds == {event.fact.kind() for event in written(FIXTURES / EVERY_KIND)} - {Skipped.kind()}
    assert kinds <= codec.KINDS.keys()


@pytest.mark.servers
async def test_it_verifies_and_the_projector_continues_from_its_position(
    release: Path, journal: NatsJournal, store: PostgresStore
) -> None:
    last = await journal.last_seq()
    read = [event async for batch in journal.read(0, until=last) for event in batch]
    expected = written(release)
    assert read == expected
    report = await verify(journal, store)
    assert report.difference is None, report.lines()
    assert 0 < report.position <= last
    assert report.audited == sum(projection.audited(event.fact) for event in expected[: report.position])
    assert report.rows > 20 and report.decided + report.skipped > 10
    assert not report.skipped if DECIDERS[release.name] >= OLDEST else not report.decided
    assert report.skipped_versions <= {DECIDERS[release.name]}, (
        "decisions of other versions are not decided again"
    )
    await Projector(journal, store).catch_up(last)
    report = await verify(journal, store)
    assert (report.difference, report.lag, report.position) == (None, 0, last)


Plant = Callable[[str], Awaitable[object]]


def _a_row_is_altered(url: str) -> Awaitable[object]:
    return execute(url, "UPDATE holdfast.breakers SET failures = failures + 1 WHERE worker = 'w0'")


def _an_incident_is_gone(url: str) -> Awaitable[object]:
    return execute(url, "DELETE FROM holdfast.incidents WHERE closed_at IS NOT NULL")


def _an_event_is_left_out(url: str) -> Awaitable[object]:
    return tamper(url, "DELETE FROM holdfast.fleet_events WHERE seq = 40")


@pytest.mark.slow
@pytest.mark.servers
@pytest.mark.parametrize(
    ("plant", "where"),
    [(_a_row_is_altered, "breakers"), (_an_incident_is_gone, "incidents"), (_an_event_is_left_out, "40")],
)
async def test_tampering_is_detected(
    journal: NatsJournal,
    store: PostgresStore,
    postgres_server: EmbeddedServer,
    empty_database_url: str,
    plant: Plant,
    where: str,
) -> None:
    await plant(first_database.tester_url(postgres_server, empty_database_url.rpartition("/")[2]))
    report = await verify(journal, store)
    assert report.difference is not None and where in f"{report.difference.where} {report.difference.seq}"
