"""Migrates a database to the schema version that this code needs, or back to an older one.

For a database that is up to date, a few queries suffice, and Alembic is not imported, so that a fleet starts quickly.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg

from controller.adapters.postgres.link import (
    AWAY,
    CONNECT_S,
    FORBIDDEN,
    HEAD,
    LOGIN,
    READ_ONLY,
    SCHEMA,
    WRITES,
    Connection,
    connected,
    masked,
    plain,
)
from controller.read_model.errors import (
    StoreForbidden,
    StoreLogin,
    StoreReadOnly,
    StoreRefused,
    StoreUnavailable,
)
from controller.read_model.grants import READER, WRITER, grants, quoted
from events.errors import HoldfastError, UsageError

Transaction: TypeAlias = Any  # an `AsyncConnection` of SQLAlchemy, which takes 0.2 s to import
LOCK = 0x0_4F1D_FA57  # key of the advisory lock of the database that allows one migration at a time
LOCK_S = 60  # maximum wait for another migration or a locked table
_BY_THE_OWNER = "Run `holdfast database migrate` with HOLDFAST_DATABASE_URL as the owner of the tables."
MIGRATIONS = Path(__file__).parents[3] / "migrations"
# deadline of a whole migration; an index on an audit table of millions of rows takes minutes
WITHIN_S = 600.0


class DatabaseInUse(HoldfastError):
    """A projector writes to this database and would fail, or migrate it again. Stop it first."""


class DatabaseTooNew(HoldfastError):
    """This database was migrated by a newer version of Holdfast. Upgrade Holdfast, or choose another database."""


RUNS_WITH = "runs with releases from migration "
"""A migration that only adds to the schema declares it in the comment on `alembic_version`, with the oldest migration that has a
compatible release: `COMMENT ON TABLE alembic_version IS 'runs with releases from migration 0002'`."""


async def upgrade(url: str, *, schema: str = SCHEMA, to: str = "head") -> None:
    """Apply all missing migrations, and grant Holdfast's accounts their rights if the server has these accounts.

    If a newer release has migrated the database in a way that is compatible with this version, nothing is changed. Raise
    DatabaseTooNew if the newer migration is not compatible, StoreUnavailable if the database cannot be migrated now, and
    StoreForbidden if the account lacks the rights.
    """
    found = await version(url, schema=schema)
    if found == HEAD and to == "head":
        return
    if found is not None and found > HEAD and to == "head" and await _runs_with(url, schema) <= HEAD:
        return  # the newer release declares that its schema is compatible with this version
    _refuse_newer(found)
    await _run(url, schema, to, up=True)


async def take_back(url: str, to: str, *, schema: str = SCHEMA) -> str:
    """Downgrade the database to an older revision, or to `base` (no tables), and return a sentence about what was done.

    Raise UsageError if the revision is unknown or newer than the database's, DatabaseInUse if a projector is connected, and the
    errors of `upgrade`.
    """
    found = await version(url, schema=schema)
    _refuse_newer(found)
    if to != "base" and to not in (known := _revisions()):
        raise UsageError(f"there is no migration {to!r}; this version has {', '.join(known)}, and `base`")
    if to != "base" and (found is None or to > found):
        raise UsageError(f"the database is at migration {found or 'base'}, which is older than {to}")
    if found is None or found == to:
        return f"the database is at migration {found or 'base'} already"
    if await _writers(url):
        raise DatabaseInUse(f"{masked(url)} stays at migration {found}. {DatabaseInUse.__doc__}")
    await _run(url, schema, to, up=False)
    return f"the database went from migration {found} back to {to}"


def _revisions() -> list[str]:
    from alembic.script import ScriptDirectory

    return sorted(revision.revision for revision in ScriptDirectory(str(MIGRATIONS)).walk_revisions())


async def _writers(url: str) -> int:
    """Return the number of connections to the database that projectors have opened."""
    asked = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = $1"
    )
    async with connected(url) as connection:
        return int(await connection.fetchval(asked, WRITES))


async def version(url: str, *, schema: str = SCHEMA) -> str | None:
    """Return the database's current migration; None if none was ever applied."""
    table = f'"{schema}".alembic_version'
    async with connected(url, schema) as connection:
        if await connection.fetchval("SELECT to_regclass($1)", table) is None:
            return None
        found: str | None = await connection.fetchval(f"SELECT max(version_num) FROM {table}")
        return found


async def _runs_with(url: str, schema: str) -> str:
    """Return the oldest migration that a release must know to use this database.

    Return "9999", which no release knows, if the database does not name one."""
    asked = "SELECT obj_description(to_regclass($1), 'pg_class')"
    async with connected(url, schema) as connection:
        said = str(await connection.fetchval(asked, f'"{schema}".alembic_version'))
    return said.removeprefix(RUNS_WITH) if said.startswith(RUNS_WITH) else "9999"


async def place(url: str) -> tuple[int, str] | None:
    """Return the journal position of a migrated database, and the CloudEvents id of the event at this position.

    Return None if no event has been projected yet or the position is lost.
    """
    asked = "SELECT shown_seq, shown_id FROM projection WHERE name = 'fleet' AND shown_seq > 0"
    try:
        async with connected(url) as connection:
            row = await connection.fetchrow(asked)
    except StoreRefused:
        return None
    return (row["shown_seq"], row["shown_id"]) if row is not None else None


def _refuse_newer(found: str | None) -> None:
    if found is not None and found > HEAD:
        raise DatabaseTooNew(
            f"the database is at migration {found}, this version only knows those up to {HEAD}. {DatabaseTooNew.__doc__}"
        )


async def rename(url: str, name: str) -> None:
    """Rename the schema of the state store to `name`, to preserve the store's rows after a loss of the journal.

    Raise StoreUnavailable if the database cannot be reached, and StoreRefused if the account may not rename the schema.
    """
    async with connected(url) as connection:
        await connection.execute(f'ALTER SCHEMA "{SCHEMA}" RENAME TO "{name}"')


_OF_TABLES = """SELECT relname AS name, privilege_type AS what, rolname AS account, is_grantable
    FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace, aclexplode(relacl) LEFT JOIN pg_roles r ON r.oid = grantee
    WHERE nspname = $1 AND relkind IN ('r', 'v') AND grantee <> relowner
        AND relname IN (SELECT relname FROM pg_class d JOIN pg_namespace m ON m.oid = d.relnamespace WHERE nspname = $2)"""
_OF_THE_SCHEMA = """SELECT '' AS name, privilege_type AS what, rolname AS account, is_grantable
    FROM pg_namespace n, aclexplode(nspacl) LEFT JOIN pg_roles r ON r.oid = grantee
    WHERE nspname = $1 AND grantee <> nspowner"""


async def copy_grants(connection: Connection, schema: str, to: str) -> None:
    """Copy all grants on the schema `schema` and its tables to the schema `to`.

    A rebuild replaces the schema by a new one, and must not lose grants that an operator has made.
    """
    found = [*await connection.fetch(_OF_THE_SCHEMA, schema), *await connection.fetch(_OF_TABLES, schema, to)]
    for row in found:
        what = f"{quoted(to)}.{quoted(row['name'])}" if row["name"] else f"SCHEMA {quoted(to)}"
        account = "PUBLIC" if row["account"] is None else quoted(row["account"])
        more = " WITH GRANT OPTION" if row["is_grantable"] else ""
        await connection.execute(f"GRANT {row['what']} ON {what} TO {account}{more}")


async def _run(url: str, schema: str, to: str, *, up: bool) -> None:
    from sqlalchemy import text
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    settings = {"search_path": schema, "lock_timeout": f"{LOCK_S}s"}
    late: asyncio.TimerHandle | None = None

    async def connect() -> Connection:
        """Connect, and terminate the connection after `WITHIN_S` seconds.

        Without the limit, a server that hangs would block the migration, and even its rollback.
        """
        nonlocal late
        connection = await asyncpg.connect(plain(url), timeout=CONNECT_S, server_settings=settings)
        late = asyncio.get_running_loop().call_later(WITHIN_S, connection.terminate)
        return connection

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK})"))
            there = await connection.execute(text("SELECT to_regnamespace(:name)"), {"name": f'"{schema}"'})
            aside = up and await _set_aside(connection, schema)
            # only if it is missing, because the account may lack the right to create it
            if there.scalar() is None or aside:
                await connection.execute(text(f'CREATE SCHEMA "{schema}"'))
            await connection.run_sync(_alembic, schema, to, up)
            if aside:
                raw = await connection.get_raw_connection()
                await copy_grants(raw.driver_connection, f"{schema}_old", schema)
            if up and to == "head":
                for grant in await _own_grants(connection, schema):
                    await connection.execute(text(grant))
    except (DBAPIError, *AWAY, *FORBIDDEN, *LOGIN, *READ_ONLY) as error:
        cut = late is not None and late.when() <= asyncio.get_running_loop().time()
        _translate(url, error, f"not done after {WITHIN_S:g} s" if cut else "")
        raise
    finally:
        if late is not None:
            late.cancel()
        await engine.dispose()


async def _set_aside(connection: Transaction, schema: str) -> bool:
    """Rename the schema if it has events but no migration version, and return whether it was renamed.

    The projector then fills new tables from the journal. The next `holdfast replay rebuild` drops the renamed schema.
    """
    from sqlalchemy import text

    names = [f'"{schema}".{table}' for table in ("fleet_events", "alembic_version")]
    asked = text("SELECT to_regclass(:kept) IS NOT NULL, to_regclass(:version) IS NOT NULL")
    kept, known = (await connection.execute(asked, {"kept": names[0], "version": names[1]})).one()
    if known:
        known = (await connection.execute(text(f"SELECT EXISTS (SELECT FROM {names[1]})"))).scalar()
    if kept and not known:
        await connection.execute(text(f'DROP SCHEMA IF EXISTS "{schema}_old" CASCADE'))
        await connection.execute(text(f'ALTER SCHEMA "{schema}" RENAME TO "{schema}_old"'))
        return True
    return False


async def _own_grants(connection: Transaction, schema: str) -> list[str]:
    """Return the GRANT statements for Holdfast's accounts; empty if the server does not have these accounts."""
    from sqlalchemy import text

    known = {row[0] for row in await connection.execute(text("SELECT rolname FROM pg_roles"))}
    writer, reader = (name if name in known else "" for name in (WRITER, READER))
    return list(grants(schema, writer=writer, reader=reader))


def _translate(url: str, error: Exception, why: str) -> None:
    """Raise the HoldfastError that corresponds to an error of the driver. Return if no HoldfastError corresponds to `error`."""
    cause = getattr(getattr(error, "orig", None), "__cause__", None) or error
    for kinds, said in ((READ_ONLY, StoreReadOnly), (LOGIN, StoreLogin)):
        if isinstance(cause, kinds):
            raise said(f"{masked(url)} cannot be migrated now: {cause}. {said.__doc__}") from error
    if isinstance(cause, FORBIDDEN):
        raise StoreForbidden(
            f"{masked(url)} cannot be migrated by this account: {cause}. {_BY_THE_OWNER}"
        ) from error
    if isinstance(cause, (*AWAY, asyncpg.LockNotAvailableError)):
        raise StoreUnavailable(
            f"{masked(url)} cannot be migrated now: {why or cause}. {StoreUnavailable.__doc__}"
        ) from error


def _alembic(connection: object, schema: str, to: str, up: bool) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes.update(connection=connection, schema=schema)
    (command.upgrade if up else command.downgrade)(config, to)


def main(environment: Mapping[str, str]) -> int:
    """Migrate the database at HOLDFAST_DATABASE_URL (`python -m controller.adapters.postgres.migrate`).

    Print the database's position on the journal as JSON. The process that starts a fleet compares this position with the journal.
    Return the exit code.
    """
    url = environment.get("HOLDFAST_DATABASE_URL")
    if not url:
        print("holdfast: set HOLDFAST_DATABASE_URL to the database to migrate", file=sys.stderr)
        return 2
    try:
        asyncio.run(upgrade(url))
        print(json.dumps(asyncio.run(place(url))))
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ))
