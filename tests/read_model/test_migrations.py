"""Migrations: up and down from an empty database, and refusals."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest
from fleet_history import History
from memory_journal import MemoryJournal
from store_databases import execute
from waits import until

from controller.adapters.postgres import link as names
from controller.adapters.postgres import migrate, writer
from controller.adapters.postgres.link import Link
from controller.adapters.postgres.migrate import DatabaseInUse, DatabaseTooNew
from controller.adapters.postgres.store import PostgresStore
from controller.cli import main
from controller.ports import StoreUnavailable
from controller.read_model import rows as projection
from controller.read_model.errors import StoreRefused
from controller.runtime.projection.projector import Projector

pytestmark = pytest.mark.servers
OBJECTS = """SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'holdfast' AND c.relkind IN ('r', 'v', 'i', 'S') ORDER BY 1"""
FUNCTIONS = (
    "SELECT proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'holdfast'"
)


async def test_up_and_down_and_up_again_from_an_empty_database(empty_database_url: str) -> None:
    await migrate.upgrade(empty_database_url)
    first = await execute(empty_database_url, OBJECTS)
    assert {"workers", "fleet_events", "projection", "fleet_now"} <= {row["relname"] for row in first}
    await migrate.take_back(empty_database_url, "base")
    left = {row["relname"] for row in await execute(empty_database_url, OBJECTS)}
    assert left <= {"alembic_version", "alembic_version_pkc"}
    assert await execute(empty_database_url, FUNCTIONS) == []
    await migrate.upgrade(empty_database_url)
    assert await execute(empty_database_url, OBJECTS) == first


async def test_a_database_is_downgraded_to_an_older_migration_with_a_report(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`holdfast database downgrade` reverts one migration or all, and refuses invalid revisions."""
    monkeypatch.setenv("HOLDFAST_DATABASE_URL", empty_database_url)

    async def down(to: str) -> tuple[int, str]:
        code = await asyncio.to_thread(main, ["database", "downgrade", "--to", to])
        said = capsys.readouterr()
        return code, said.out + said.err

    assert await down("base") == (0, "the database is at migration base already\n")
    await migrate.upgrade(empty_database_url)
    assert await down("0001") == (0, f"the database went from migration {names.HEAD} back to 0001\n")
    assert await migrate.version(empty_database_url) == "0001"
    code, said = await down("0002")
    assert code == 2 and "the database is at migration 0001, which is older than 0002" in said
    code, said = await down("0815")
    assert code == 2 and "there is no migration '0815'; this version has 0001, 0002" in said
    assert await down("base") == (0, "the database went from migration 0001 back to base\n")
    assert await asyncio.to_thread(main, ["database", "migrate"]) == 0
    assert await migrate.version(empty_database_url) == names.HEAD


async def test_a_database_with_a_connected_projector_is_not_downgraded(database_url: str) -> None:
    history, store = History().start(), PostgresStore(database_url)
    try:
        await Projector(MemoryJournal(history.stream, "projector:test"), store).catch_up(len(history.events))
        with pytest.raises(DatabaseInUse, match=r"stays at migration .*Stop it first"):
            await migrate.take_back(database_url, "0001")
        assert await migrate.version(database_url) == names.HEAD
    finally:
        await store.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [("upgrade", "head"), ("downgrade", "base"), ("upgrade", "head", "--sql")]
)
def test_alembic_without_the_products_connection_refuses(command: tuple[str, ...]) -> None:
    """`alembic` alone has no connection, lock or schema: it names the command that has, instead of doing nothing."""
    ran = subprocess.run(
        [sys.executable, "-m", "alembic", "-c", "migrations/alembic.ini", *command],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode != 0
    assert "holdfast database migrate" in ran.stderr + ran.stdout and "Traceback" not in ran.stderr


async def test_migrating_twice_changes_nothing(empty_database_url: str) -> None:
    await migrate.upgrade(empty_database_url)
    await migrate.upgrade(empty_database_url)
    assert await migrate.version(empty_database_url) == names.HEAD


async def test_a_migration_blocked_by_another_one_reports_that_and_can_be_retried(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "LOCK_S", 1)
    other = await asyncpg.connect(empty_database_url)
    try:
        await other.execute(f"SELECT pg_advisory_lock({migrate.LOCK})")
        with pytest.raises(StoreUnavailable, match=r"cannot be migrated now: .*lock timeout"):
            async with asyncio.timeout(30):
                await migrate.upgrade(empty_database_url)
    finally:
        await other.close()
    await migrate.upgrade(empty_database_url)
    assert await migrate.version(empty_database_url) == names.HEAD


async def test_a_migration_that_exceeds_its_deadline_is_given_up(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "WITHIN_S", 0.5)
    other = await asyncpg.connect(empty_database_url)
    try:
        await other.execute(f"SELECT pg_advisory_lock({migrate.LOCK})")
        with pytest.raises(StoreUnavailable, match=r"cannot be migrated now: not done after 0\.5 s"):
            async with asyncio.timeout(20):
                await migrate.upgrade(empty_database_url)
    finally:
        await other.close()


async def test_a_server_that_hangs_during_a_migration_does_not_block_the_caller(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "WITHIN_S", 0.5)
    other = await asyncpg.connect(empty_database_url)
    waiting = (
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
    )
    await other.execute(f"SELECT pg_advisory_lock({migrate.LOCK})")
    migrating = asyncio.ensure_future(migrate.upgrade(empty_database_url))
    pid = 0
    try:
        async with asyncio.timeout(30):
            pid = await until(lambda: other.fetchval(waiting))
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(StoreUnavailable, match="not done after"):
                await migrating
    finally:
        if pid:
            os.kill(pid, signal.SIGCONT)
        await other.close()


async def test_a_database_lost_during_a_migration_is_reported_as_unavailable(empty_database_url: str) -> None:
    other = await asyncpg.connect(empty_database_url)
    try:
        await other.execute(f"SELECT pg_advisory_lock({migrate.LOCK})")
        migrating = asyncio.ensure_future(migrate.upgrade(empty_database_url))
        waiting = (
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
        )
        async with asyncio.timeout(30):
            pid = await until(lambda: other.fetchval(waiting))
            await other.execute("SELECT pg_terminate_backend($1)", pid)
            with pytest.raises(StoreUnavailable, match="cannot be migrated now"):
                await migrating
    finally:
        await other.close()


async def test_the_newest_migration_is_the_head_that_the_code_names() -> None:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", "migrations")
    assert ScriptDirectory.from_config(config).get_current_head() == names.HEAD


async def test_the_migrations_create_the_columns_that_the_code_writes(database_url: str) -> None:
    found = await execute(
        database_url,
        "SELECT table_name, column_name, data_type FROM information_schema.columns "
        "WHERE table_schema = 'holdfast' ORDER BY table_name, ordinal_position",
    )
    created = {
        table: [(row["column_name"], row["data_type"]) for row in found if row["table_name"] == table]
        for table in writer.COLUMNS
    }
    assert created == {
        table: [(column, writer.TYPE_OF.get(column, "text")) for column in columns]
        for table, columns in writer.COLUMNS.items()
    }


async def test_the_keys_of_rows_are_the_primary_keys_of_their_tables(database_url: str) -> None:
    keys = await execute(
        database_url,
        "SELECT c.conrelid::regclass::text AS name, array_agg(a.attname ORDER BY a.attnum) AS columns "
        "FROM pg_constraint c JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = ANY(c.conkey) "
        "WHERE c.contype = 'p' AND c.connamespace = 'holdfast'::regnamespace GROUP BY c.conrelid",
    )
    primary = {row["name"].removeprefix("holdfast."): tuple(row["columns"]) for row in keys}
    for table, columns in projection.COLUMNS.items():
        assert primary[table] == columns[: projection.KEYS.get(table, 1)], table


INDEXES = [
    "UNIQUE breakers btree (worker)",
    "UNIQUE exposures btree (id)",
    "UNIQUE fleet_events btree (id)",
    "UNIQUE fleet_events btree (seq)",
    "UNIQUE goldens btree (canary_key, canary)",
    "UNIQUE incidents btree (incident)",
    "UNIQUE levels btree (model)",
    "UNIQUE migrations btree (id)",
    "UNIQUE projection btree (name)",
    "UNIQUE snapshots btree (reach)",
    "UNIQUE workers btree (worker)",
    "exposures btree (worker, at)",
    "fleet_events brin (at)",
    "fleet_events btree (incident, seq) WHERE (incident IS NOT NULL)",
    "fleet_events btree (kind, seq)",
    "fleet_events btree (number) WHERE (number IS NOT NULL)",
    "fleet_events btree (worker, seq) WHERE (worker IS NOT NULL)",
    "migrations btree (at)",
]
"""Each index of the state store: whether it is unique, its table, method, columns and condition."""
OPTIONAL = [
    "breakers.deadline",
    "breakers.retry_at",
    "exposures.finished",
    "exposures.first",
    "exposures.last",
    "exposures.model",
    "exposures.request",
    "exposures.since",
    "exposures.until",
    "fleet_events.frontend",
    "fleet_events.incident",
    "fleet_events.instance",
    "fleet_events.model",
    "fleet_events.number",
    "fleet_events.request",
    "fleet_events.said_at",
    "fleet_events.through",
    "fleet_events.worker",
    "incidents.closed_at",
    "incidents.outcome",
    "levels.capacity_rps",
    "levels.ratio",
    "levels.since",
    "projection.shown_at",
    "workers.drain_deadline",
    "workers.last_canary",
]
"""The columns that may be null."""


async def test_the_migrations_create_these_indexes_and_optional_columns(database_url: str) -> None:
    indexes = await execute(database_url, "SELECT * FROM pg_indexes WHERE schemaname = 'holdfast'")
    created = [
        ("UNIQUE " if "UNIQUE" in row["indexdef"] else "")
        + row["tablename"]
        + " "
        + row["indexdef"].partition(" USING ")[2]
        for row in indexes
        if row["tablename"] != "alembic_version"
    ]
    assert sorted(created) == INDEXES
    nullable = await execute(
        database_url,
        "SELECT table_name, column_name FROM information_schema.columns JOIN information_schema.tables "
        "USING (table_schema, table_name) WHERE table_schema = 'holdfast' AND is_nullable = 'YES' "
        "AND table_type = 'BASE TABLE' ORDER BY table_name, column_name",
    )
    assert [f"{row['table_name']}.{row['column_name']}" for row in nullable] == OPTIONAL


async def test_a_database_of_a_newer_version_is_refused_in_one_sentence(database_url: str) -> None:
    await execute(database_url, "UPDATE holdfast.alembic_version SET version_num = '9999'")
    with pytest.raises(DatabaseTooNew, match=r"migration 9999.*Upgrade Holdfast"):
        await migrate.upgrade(database_url)
    with pytest.raises(DatabaseTooNew):
        await migrate.take_back(database_url, "base")


async def test_a_database_that_the_next_release_only_added_to_is_used_unchanged(database_url: str) -> None:
    """Migrations expand first: this release works with the next schema, so that its processes can be rolled back to it."""
    await execute(
        database_url, "ALTER TABLE holdfast.workers ADD COLUMN of_tomorrow text DEFAULT 'x' NOT NULL"
    )
    await execute(database_url, "CREATE TABLE holdfast.of_tomorrow (id int)")
    await execute(database_url, "UPDATE holdfast.alembic_version SET version_num = '9001'")
    says = "COMMENT ON TABLE holdfast.alembic_version IS 'runs with releases from migration {}'"
    await execute(database_url, says.format("9001"))
    with pytest.raises(DatabaseTooNew):
        await migrate.upgrade(database_url)
    await execute(database_url, says.format("0002"))
    await migrate.upgrade(database_url)
    assert await migrate.version(database_url) == "9001"
    history = History().start()
    store = PostgresStore(database_url)
    try:
        await Projector(MemoryJournal(history.stream, "projector:test"), store).catch_up(len(history.events))
        assert (await store.position()).seq == len(history.events)
        assert (await store.read_status()).rows["workers"]
    finally:
        await store.close()


async def test_an_unavailable_or_unmigrated_database_is_reported_as_such(empty_database_url: str) -> None:
    store = PostgresStore(empty_database_url)
    with pytest.raises(StoreRefused, match="does not have the tables"):
        await store.position()
    await store.close()
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1/"):
        await migrate.upgrade("postgresql://user:secret@127.0.0.1:1/nowhere")


async def test_a_server_with_missing_files_counts_as_unavailable(database_url: str) -> None:
    link = Link(database_url)
    gone = "DO $$ BEGIN RAISE EXCEPTION 'could not open file' USING ERRCODE = 'undefined_file'; END $$"
    with pytest.raises(StoreUnavailable, match="could not open file"):
        async with link.use() as connection:
            await connection.execute(gone)
    await link.close()


async def test_a_password_is_never_shown(empty_database_url: str) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        await migrate.upgrade("postgresql://user:secret@127.0.0.1:1/nowhere")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("statement", ["UPDATE holdfast.fleet_events SET kind = ''", "DELETE FROM holdfast.fleet_events",
                                       "TRUNCATE holdfast.fleet_events"])  # fmt: skip
async def test_events_are_append_only(database_url: str, tester_url: str, statement: str) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="append-only"):
        await execute(tester_url, statement)  # a superuser may do anything, so the trigger has to refuse it
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied"):
        await execute(database_url, statement)


async def test_the_right_to_change_events_is_revoked(database_url: str) -> None:
    query = "SELECT relacl::text FROM pg_class WHERE relname = 'fleet_events'"
    granted = (await execute(database_url, query))[0]["relacl"]
    letters = granted.partition("=")[2].partition("/")[0]
    assert not set(letters) & set("wdD")  # update, delete, truncate


def test_every_table_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "state-store.md").read_text()
    for name in (*writer.COLUMNS, "projection", "fleet_now", "model_capacity"):
        assert f"| `{name}`" in text, name
    for column in projection.EVENT_COLUMNS:
        if column not in ("kind", "source", "source_number", "said_at", "correlation", "id"):
            assert f"`{column}`" in text, column


async def test_the_documented_queries_work(database_url: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "state-store.md").read_text()
    queries = text.split("```sql\n")[1].split("```")[0].split(";\n")
    assert len([q for q in queries if q.strip()]) == 4
    for query in queries:
        if query.strip():
            await execute(database_url, query)
