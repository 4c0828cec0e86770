"""The rights of the embedded database's accounts: forbidden statements fail, and the fleet works."""

import asyncio
from pathlib import Path

import asyncpg
import first_database
import pytest
import structlog
from fleet_history import History
from memory_journal import MemoryJournal, MemoryStream
from store_databases import execute, on
from waits import until

from controller.adapters.embedded.accounts import DatabaseUrls
from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.postgres import migrate
from controller.adapters.postgres.store import PostgresStore
from controller.ports import StoreLost
from controller.processes.projector import run_projector
from controller.read_model.errors import StoreForbidden, StoreLogin, StoreReadOnly, StoreUnavailable
from controller.read_model.grants import READER_STATEMENT_S
from controller.replay.rebuild import rebuild
from controller.replay.verify import verify
from controller.runtime.projection.projector import Projector
from controller.runtime.settings import ProjectorSettings

pytestmark = pytest.mark.servers

FORBIDDEN_TO_ALL = (
    "COPY (SELECT 1) TO PROGRAM 'cat'",
    "COPY holdfast.goldens FROM PROGRAM 'echo'",
    "COPY (SELECT 1) TO '/tmp/somewhere'",
    "SELECT pg_read_file('/etc/hostname')",
    "SELECT rolpassword FROM pg_authid",
    "SELECT lo_create(0)",
    "LOAD '$libdir/plpgsql_check'",
    "SET session_replication_role = replica",
    "SET ROLE postgres",
    "SET SESSION AUTHORIZATION postgres",
    "ALTER SYSTEM SET log_statement = 'all'",
    "ALTER ROLE CURRENT_USER SUPERUSER",
    "CREATE ROLE another LOGIN",
    "CREATE DATABASE another",
    "CREATE EXTENSION vector SCHEMA holdfast",
    "CREATE TABLE public.mine (n int)",
    "CREATE TEMPORARY TABLE mine (n int)",
    "UPDATE holdfast.fleet_events SET kind = ''",
    "DELETE FROM holdfast.fleet_events",
    "TRUNCATE holdfast.fleet_events",
    "ALTER TABLE holdfast.fleet_events DISABLE TRIGGER ALL",
    "ALTER TABLE holdfast.fleet_events DISABLE TRIGGER fleet_events_append_only",
    "ALTER TABLE holdfast.fleet_events ENABLE REPLICA TRIGGER fleet_events_append_only",
    "ALTER TRIGGER fleet_events_append_only ON holdfast.fleet_events RENAME TO other",
    "DROP TRIGGER fleet_events_append_only ON holdfast.fleet_events",
    "DROP FUNCTION holdfast.fleet_events_append_only CASCADE",
    "CREATE OR REPLACE FUNCTION holdfast.fleet_events_append_only() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN END'",
    "CREATE OR REPLACE TRIGGER fleet_events_append_only BEFORE UPDATE OF kind ON holdfast.fleet_events"
    " FOR EACH STATEMENT EXECUTE FUNCTION holdfast.fleet_events_append_only()",
    "ALTER EVENT TRIGGER holdfast_sql_drop DISABLE",
    "DROP SCHEMA fleet_guard CASCADE",
)
TO_WRITERS = (
    "DROP TABLE holdfast.workers",
    "ALTER TABLE holdfast.workers ADD COLUMN n int",
    "TRUNCATE holdfast.workers",
    "DELETE FROM holdfast.incidents",
    "DELETE FROM holdfast.migrations",
    "UPDATE holdfast.migrations SET tokens = 0",
    "DELETE FROM holdfast.exposures",
    "DELETE FROM holdfast.snapshots",
    "DELETE FROM holdfast.projection",
    "UPDATE holdfast.alembic_version SET version_num = '9999'",
    "CREATE TABLE holdfast.mine (n int)",
    "CREATE SCHEMA mine",
    "ALTER SCHEMA holdfast RENAME TO other",
    "SELECT * FROM holdfast_next.workers",  # of an unfinished rebuild
)
TO_READERS = (
    "UPDATE holdfast.workers SET weight = 0",
    "INSERT INTO holdfast.levels SELECT * FROM holdfast.levels",
    "DELETE FROM holdfast.breakers",
    "UPDATE holdfast.projection SET shown_seq = 0",
    "INSERT INTO holdfast.fleet_events SELECT * FROM holdfast.fleet_events",
    "SELECT * FROM holdfast.workers FOR UPDATE",
    "BEGIN; LOCK TABLE holdfast.projection IN EXCLUSIVE MODE",
)


@pytest.fixture
def urls(postgres_server: EmbeddedServer, database_url: str) -> DatabaseUrls:
    """Return the URLs of the test's database for each account."""
    name = database_url.rpartition("/")[2]
    ours = first_database.urls(postgres_server)
    return DatabaseUrls(on(ours.owner, name), on(ours.writer, name), on(ours.reader, name))


async def refused(url: str, statement: str) -> bool:
    """Try a statement in a read-write session; return whether it was refused for lack of a right."""
    connection = await asyncpg.connect(url, timeout=10)
    try:
        await connection.execute("SET default_transaction_read_only = off")
        await connection.execute(statement)
    except (asyncpg.InsufficientPrivilegeError, asyncpg.FeatureNotSupportedError):
        return True
    finally:
        await connection.close()
    return False


@pytest.mark.slow
async def test_no_account_runs_programs_reads_files_or_changes_kept_events(urls: DatabaseUrls) -> None:
    done = [
        (url.split(":")[1], statement)
        for url in (urls.owner, urls.writer, urls.reader)
        for statement in FORBIDDEN_TO_ALL
        if not await refused(url, statement)
    ]
    assert done == []


async def test_the_projectors_account_only_appends_and_updates_and_a_readers_only_reads(
    urls: DatabaseUrls,
) -> None:
    await migrate.upgrade(urls.owner, schema="holdfast_next")
    await execute(urls.owner, "REVOKE ALL ON SCHEMA holdfast_next FROM holdfast_writer, holdfast_reader")
    for statement in TO_WRITERS:
        assert await refused(urls.writer, statement), statement
    for statement in TO_WRITERS + TO_READERS:
        assert await refused(urls.reader, statement), statement


async def test_the_trigger_refuses_even_an_owner_that_grants_itself_the_right(urls: DatabaseUrls) -> None:
    await execute(urls.owner, "GRANT ALL ON holdfast.fleet_events TO CURRENT_USER")
    for statement in ("UPDATE holdfast.fleet_events SET kind = ''", "TRUNCATE holdfast.fleet_events"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="append-only"):
            await execute(urls.owner, statement)


@pytest.mark.slow
async def test_each_account_does_its_work_and_keeps_its_rights_after_a_rebuild(
    urls: DatabaseUrls, tester_url: str
) -> None:
    history = History().start().corruption()
    journal = MemoryJournal(MemoryStream(history.events), "test")
    await execute(tester_url, "DROP ROLE IF EXISTS a_dashboard")
    await execute(tester_url, "CREATE ROLE a_dashboard")
    await execute(urls.owner, "GRANT USAGE ON SCHEMA holdfast TO a_dashboard")
    await execute(urls.owner, "GRANT SELECT ON holdfast.fleet_now TO a_dashboard")
    owner, writer, reader = (
        PostgresStore(url, snapshot_every=5) for url in (urls.owner, urls.writer, urls.reader)
    )
    try:
        with pytest.raises(StoreReadOnly, match="holdfast database grants"):
            await Projector(journal, reader).catch_up(1)
        await Projector(journal, writer).catch_up(len(history.events) // 2)
        await rebuild(journal, owner)
        await Projector(journal, writer).catch_up(len(history.events))
        report = await verify(journal, reader)
        assert (report.difference, report.lag) == (None, 0) and report.rows > 3
        with pytest.raises(StoreForbidden, match="cannot be migrated by this account"):
            await writer.beside()
    finally:
        for store in (owner, writer, reader):
            await store.close()
    for _ in range(2):  # the second rebuild proves that the first lost no right
        assert await refused(urls.writer, "TRUNCATE holdfast.workers")
    allowed = "SELECT has_table_privilege('a_dashboard', 'holdfast.fleet_now', 'SELECT')"
    assert (await execute(tester_url, allowed))[0][0]
    await execute(tester_url, "DROP OWNED BY a_dashboard")


async def test_a_readers_sessions_have_a_statement_timeout_and_are_read_only(urls: DatabaseUrls) -> None:
    assert (await execute(urls.reader, "SHOW statement_timeout"))[0][0] == f"{READER_STATEMENT_S}s"
    assert (await execute(urls.reader, "SHOW transaction_read_only"))[0][0] == "on"


async def test_no_account_can_connect_without_the_password(
    postgres_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGPASSWORD", "PGPASSFILE"):
        monkeypatch.delenv(name, raising=False)
    place = f"127.0.0.1:{postgres_server.port}"
    for account in (
        "holdfast_owner",
        "holdfast_writer",
        "holdfast_reader",
        "holdfast",
        "postgres",
        "unknown",
    ):
        for password in ("", ":wrong", ":postgres"):
            for database in ("holdfast", "postgres", "template1"):
                with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError):
                    await asyncpg.connect(f"postgresql://{account}{password}@{place}/{database}", timeout=10)
    ours = first_database.urls(postgres_server)
    for url in (ours.owner, ours.writer, ours.reader):
        for database in ("postgres", "template1"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await asyncpg.connect(on(url, database), timeout=10)
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await asyncpg.connect(url, timeout=10, server_settings={"replication": "database"})


async def test_an_account_that_may_not_migrate_gets_advice(urls: DatabaseUrls, tmp_path: Path) -> None:
    await migrate.upgrade(urls.writer)  # nothing is missing, so no right is needed
    await migrate.take_back(urls.owner, "base")
    with pytest.raises(
        StoreForbidden, match=r"cannot be migrated by this account: .*holdfast database migrate"
    ):
        await migrate.upgrade(urls.writer)
    with pytest.raises(StoreLost, match=r"cannot be migrated by this account: .*holdfast replay rebuild"):
        await run_projector(
            ProjectorSettings(), nats_url="", database_url=urls.writer, data=tmp_path, name="p"
        )
    await migrate.upgrade(urls.owner)
    await (store := PostgresStore(urls.writer)).position()
    await store.close()


async def test_the_printed_grants_are_enough_for_an_external_database(
    postgres_server: EmbeddedServer, empty_database_url: str
) -> None:
    from controller.read_model.grants import script

    name = empty_database_url.rpartition("/")[2]
    tester = first_database.tester_url(postgres_server, name)
    roles = {role: f"{name}_{role}" for role in ("owner", "writer", "reader")}
    first, _, second = script("holdfast", **roles).partition("-- as the owner")
    connection = await asyncpg.connect(tester, timeout=10)
    try:
        await connection.execute(first)
        for role in roles.values():
            await connection.execute(f"ALTER ROLE {role} PASSWORD 'p'")
        own = {
            role: f"postgresql://{account}:p@127.0.0.1:{postgres_server.port}/{name}"
            for role, account in roles.items()
        }
        await migrate.upgrade(own["owner"])
        await execute_script(own["owner"], "--" + second)
        history = History().start().corruption()
        journal = MemoryJournal(MemoryStream(history.events), "test")
        stores = {role: PostgresStore(url, snapshot_every=5) for role, url in own.items()}
        await Projector(journal, stores["writer"]).catch_up(len(history.events))
        await rebuild(journal, stores["owner"])
        assert (await verify(journal, stores["reader"])).difference is None
        for store in stores.values():
            await store.close()
        assert await refused(own["writer"], "TRUNCATE holdfast.workers")
    finally:
        for role in roles.values():
            await connection.execute(f"DROP OWNED BY {role} CASCADE")
            await connection.execute(f"DROP ROLE {role}")
        await connection.close()


async def execute_script(url: str, script: str) -> None:
    """Run statements as psql would."""
    connection = await asyncpg.connect(url, timeout=10)
    try:
        await connection.execute(script)
    finally:
        await connection.close()


async def test_a_standby_or_a_wrong_password_makes_the_projector_wait_with_a_reason(
    urls: DatabaseUrls, tester_url: str
) -> None:
    """After a failover, or between a changed password and its deployment, the store returns in a moment.

    The projector must continue by itself, where it once ended with advice to rebuild."""
    history = History().start().corruption()
    journal = MemoryJournal(MemoryStream(history.events), "test")
    store = PostgresStore(urls.writer)
    projector = Projector(journal, store)
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(projector.run())
        try:
            await execute(tester_url, "ALTER ROLE holdfast_writer SET default_transaction_read_only = on")
            await store.close()
            await until(lambda: any("accepts no writes" in str(entry) for entry in logs), 60)
            await execute(tester_url, "ALTER ROLE holdfast_writer RESET default_transaction_read_only")
            await until(lambda: projector.progress.projected == history.events[-1].seq, 60)
        finally:
            await execute(tester_url, "ALTER ROLE holdfast_writer RESET default_transaction_read_only")
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await store.close()
    assert {entry["event"] for entry in logs} >= {"projector_waits"}


async def test_migrations_and_the_store_wait_for_a_correct_password(urls: DatabaseUrls) -> None:
    scheme, _, rest = urls.writer.partition("://")
    account, _, place = rest.rpartition("@")
    wrong = f"{scheme}://{account.partition(':')[0]}:wrong@{place}"
    with pytest.raises(StoreLogin, match="password"):
        await migrate.upgrade(wrong)
    store = PostgresStore(wrong)
    with pytest.raises(StoreLogin, match="password") as raised:
        await store.position()
    assert "wrong" not in str(raised.value) and "rebuild" not in str(raised.value)
    assert isinstance(raised.value, StoreUnavailable)
    await store.close()
