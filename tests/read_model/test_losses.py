"""Losses of the state store: the projector detects each, and the journal repairs it."""

import asyncio
from typing import Any

import first_database
import pytest
from fleet_history import History
from memory_journal import MemoryJournal
from memory_store import MemoryStore
from store_databases import OpenStore, clone, drop, execute, tamper

from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.postgres import migrate
from controller.adapters.postgres.link import HEAD
from controller.adapters.postgres.store import PostgresStore
from controller.ports import StoreLost
from controller.read_model.errors import StoreGone
from controller.replay.rebuild import rebuild
from controller.replay.verify import verify
from controller.runtime.projection.projector import Projector, refuse_lost_rows

servers = pytest.mark.servers


def eventful() -> History:
    history = History().start().corruption()
    history.say(history.migrated("req-2", "w0", "w1"), history.exposed("req-2", "w0"), source="frontend-0")
    history.decide()
    return history


def a_journal(history: History) -> MemoryJournal:
    return MemoryJournal(history.stream, "test")


async def projected(url: str, history: History) -> None:
    store = PostgresStore(url)
    await Projector(a_journal(history), store).catch_up(len(history.events))
    await store.close()


async def found_by_a_projector(url: str, history: History) -> str:
    """Return the loss that a starting projector reports."""
    store = PostgresStore(url)
    try:
        with pytest.raises(StoreLost) as lost:
            async with asyncio.timeout(20):
                await Projector(a_journal(history), store).run()
    finally:
        await store.close()
    assert "`holdfast replay rebuild` rebuilds it from the journal" in str(lost.value)
    return str(lost.value)


async def assert_rebuilt(url: str, history: History) -> None:
    store = PostgresStore(url)
    try:
        assert not (await rebuild(a_journal(history), store)).foreign
        await refuse_lost_rows(a_journal(history), store)
        report = await verify(a_journal(history), store)
        assert report.difference is None, report.lines()
        assert report.position == report.audited == len(history.events)
    finally:
        await store.close()


@pytest.mark.slow
@servers
@pytest.mark.parametrize("table", ["projection", "incidents", "migrations", "exposures", "fleet_events"])
async def test_a_truncated_table_is_detected_and_a_rebuild_repairs_it(
    database_url: str, tester_url: str, table: str
) -> None:
    history = eventful()
    await projected(database_url, history)
    await tamper(tester_url, f"TRUNCATE holdfast.{table}")
    assert f"rows are missing from {table}" in await found_by_a_projector(database_url, history)
    await assert_rebuilt(database_url, history)


@pytest.mark.slow
@servers
@pytest.mark.parametrize("table", ["incidents", "fleet_events"])
async def test_a_table_lost_under_a_running_projector_is_detected_while_it_writes(
    database_url: str, tester_url: str, eventually: Any, table: str
) -> None:
    history = eventful()
    await projected(database_url, history)
    store = PostgresStore(database_url)
    projector = Projector(a_journal(history), store, look_every_s=0.02)
    running = asyncio.create_task(projector.run())
    await eventually(lambda: projector.progress.connected)
    await tamper(tester_url, f"TRUNCATE holdfast.{table}")
    history.say(history.passed("w0"))
    with pytest.raises(StoreLost, match=f"rows are missing from {table}"):
        await asyncio.wait_for(running, 20)
    await store.close()
    history.say(history.passed("w1"))
    assert table in await found_by_a_projector(database_url, history)  # and so it is at the next start


@servers
async def test_missing_rows_of_the_fleets_state_are_written_again(database_url: str, eventually: Any) -> None:
    history = eventful()
    store = PostgresStore(database_url)
    projector = Projector(a_journal(history), store, look_every_s=0.02)
    running = asyncio.create_task(projector.run())
    await eventually(lambda: projector.progress.projected == len(history.events))
    await execute(database_url, "TRUNCATE holdfast.workers, holdfast.breakers")

    async def there_again() -> bool:
        history.say(history.passed("w0"))
        return len(await execute(database_url, "SELECT FROM holdfast.breakers")) == 3

    await eventually(there_again)
    assert len(await execute(database_url, "SELECT FROM holdfast.workers")) == 3
    running.cancel()
    await store.close()


@pytest.mark.slow
@servers
@pytest.mark.parametrize(
    "statement",
    ["DROP SCHEMA holdfast CASCADE", "DROP TABLE holdfast.incidents", "DROP TABLE holdfast.projection"],
)
async def test_missing_tables_are_detected_and_a_rebuild_creates_them(
    database_url: str, statement: str
) -> None:
    history = eventful()
    await projected(database_url, history)
    await execute(database_url, statement)
    assert "tables are missing" in await found_by_a_projector(database_url, history)
    await assert_rebuilt(database_url, history)


@pytest.mark.slow
@servers
@pytest.mark.parametrize(
    "statement", ["DROP TABLE holdfast.alembic_version", "TRUNCATE holdfast.alembic_version"]
)
async def test_tables_without_a_version_are_set_aside_and_projected_again(
    database_url: str, statement: str
) -> None:
    history = eventful()
    await projected(database_url, history)
    await execute(database_url, "GRANT SELECT ON holdfast.workers TO PUBLIC")
    await execute(database_url, statement)
    await migrate.upgrade(database_url)
    assert await migrate.version(database_url) == HEAD
    await projected(database_url, history)
    await assert_rebuilt(database_url, history)
    granted = "SELECT 'PUBLIC' = ANY (SELECT grantee FROM information_schema.role_table_grants WHERE table_name = 'workers')"
    (row,) = await execute(database_url, granted)
    assert row[0]


@servers
async def test_the_projector_waits_for_a_missing_database_and_fills_it(
    postgres_server: EmbeddedServer, eventually: Any
) -> None:
    history = eventful()
    url, spare = await clone(postgres_server), await clone(postgres_server)
    store = PostgresStore(url)
    await Projector(a_journal(history), store).catch_up(len(history.events))
    await drop(postgres_server, url)

    async def gone() -> bool:
        try:
            await migrate.upgrade(url)
        except StoreGone as error:
            return "createdb" in str(error)
        return False

    await eventually(gone)
    tester = first_database.tester_url(postgres_server)
    await execute(tester, f"ALTER DATABASE {spare.rpartition('/')[2]} RENAME TO {url.rpartition('/')[2]}")
    await Projector(a_journal(history), store).catch_up(len(history.events))
    assert (await verify(a_journal(history), store)).difference is None
    await store.close()
    await drop(postgres_server, url)


@servers
async def test_an_older_backup_catches_up(postgres_server: EmbeddedServer, database_url: str) -> None:
    history = eventful()
    half = len(history.events) // 2
    store = PostgresStore(database_url)
    await Projector(a_journal(history), store).catch_up(half)
    await store.close()
    older = await clone(postgres_server, database_url.rpartition("/")[2])
    await projected(older, history)
    store = PostgresStore(older)
    report = await verify(a_journal(history), store)
    assert report.difference is None and report.position == len(history.events)
    await store.close()
    await drop(postgres_server, older)


@servers
async def test_an_older_backup_of_one_table_is_detected(database_url: str, tester_url: str) -> None:
    history = eventful()
    await projected(database_url, history)
    await tamper(tester_url, "DELETE FROM holdfast.fleet_events WHERE seq > 9")
    assert "fleet_events" in await found_by_a_projector(database_url, history)
    await assert_rebuilt(database_url, history)
    await tamper(tester_url, "DELETE FROM holdfast.fleet_events WHERE seq < 9")
    assert "fleet_events" in await found_by_a_projector(database_url, history)


async def test_a_complete_store_has_no_losses(open_store: OpenStore) -> None:
    history, store = History(), open_store()
    await refuse_lost_rows(a_journal(history), store)
    history = eventful()
    for end in range(1, len(history.events) + 1):
        await Projector(a_journal(history), store).catch_up(end)
        await refuse_lost_rows(a_journal(history), store)
    history.repeat(history.events[-3])  # is kept under its first sequence
    history.repeat(history.events[-3])
    await Projector(a_journal(history), store).catch_up(len(history.events))
    await refuse_lost_rows(a_journal(history), store)


@pytest.mark.parametrize("table", ["incidents", "migrations", "exposures", "fleet_events"])
async def test_the_double_detects_losses_too(table: str) -> None:
    history, store = eventful(), MemoryStore()
    await Projector(a_journal(history), store).catch_up(len(history.events))
    if table == "fleet_events":
        store.tables.events.clear()
    else:
        store.tables.rows[table].clear()
    with pytest.raises(StoreLost, match=table):
        await refuse_lost_rows(a_journal(history), store)
