"""Bring a database to the version that this code needs, or back.

The common case, a database that is up to date, is answered by one query, before Alembic is imported: a fleet's start
should not wait for it.
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncpg

from controller.adapters.postgres.link import AWAY, CONNECT_S, Link, masked, plain
from controller.adapters.postgres.schema import HEAD, SCHEMA
from controller.read_model.errors import StoreUnavailable
from events.errors import HoldfastError

LOCK = 0x0_4F1D_FA57  # one migration at a time: an advisory lock of the database
LOCK_S = 60  # how long to wait for another migration, or for a table that somebody holds
WITHIN_S = 600.0  # all of it; an index on an audit table of millions takes minutes


class DatabaseTooNew(HoldfastError):
    """This database was migrated by a newer version of Holdfast. Upgrade Holdfast, or choose another database."""


async def upgrade(url: str, *, schema: str = SCHEMA, to: str = "head") -> None:
    """Apply every migration that is missing. Raise DatabaseTooNew or StoreUnavailable."""
    found = await version(url, schema=schema)
    if found == HEAD and to == "head":
        return
    _refuse_newer(found)
    await _run(url, schema, to, up=True)


async def downgrade(url: str, *, schema: str = SCHEMA, to: str = "base") -> None:
    """Take migrations back, all of them by default. Raise DatabaseTooNew or StoreUnavailable."""
    _refuse_newer(await version(url, schema=schema))
    await _run(url, schema, to, up=False)


async def version(url: str, *, schema: str = SCHEMA) -> str | None:
    """Return the migration that the database stands at; None if none was ever applied."""
    link = Link(url, schema)
    try:
        async with link.use() as connection:
            if await connection.fetchval("SELECT to_regclass($1)", f'"{schema}".alembic_version') is None:
                return None
            found: str | None = await connection.fetchval(
                f'SELECT max(version_num) FROM "{schema}".alembic_version'
            )
            return found
    finally:
        await link.close()


def _refuse_newer(found: str | None) -> None:
    if found is not None and found > HEAD:
        raise DatabaseTooNew(
            f"the database is at migration {found}, this version knows {HEAD}. {DatabaseTooNew.__doc__}"
        )


async def _run(url: str, schema: str, to: str, *, up: bool) -> None:
    from sqlalchemy import text
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    settings = {"search_path": schema, "lock_timeout": f"{LOCK_S}s"}
    late: asyncio.TimerHandle | None = None

    async def connect() -> Any:
        """Connect, for so long: a server that hangs in the middle would hold up even the rollback."""
        nonlocal late
        connection = await asyncpg.connect(plain(url), timeout=CONNECT_S, server_settings=settings)
        late = asyncio.get_running_loop().call_later(WITHIN_S, connection.terminate)
        return connection

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK})"))
            await connection.execute(text(f'CREATE SCHEMA IF NOT EXISTS "{schema}"'))
            await connection.run_sync(_alembic, schema, to, up)
    except (DBAPIError, *AWAY) as error:
        cause = error.orig.__cause__ if isinstance(error, DBAPIError) and error.orig else error
        if isinstance(cause, (*AWAY, asyncpg.LockNotAvailableError)):
            if late is not None and late.when() <= asyncio.get_running_loop().time():
                cause = f"not done after {WITHIN_S:g} s"
            raise StoreUnavailable(
                f"{masked(url)} cannot be migrated now: {cause}. {StoreUnavailable.__doc__}"
            ) from error
        raise
    finally:
        if late is not None:
            late.cancel()
        await engine.dispose()


def _alembic(connection: Any, schema: str, to: str, up: bool) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[3] / "migrations"))
    config.attributes.update(connection=connection, schema=schema)
    (command.upgrade if up else command.downgrade)(config, to)


def main(environment: Mapping[str, str]) -> int:
    """Migrate the database that HOLDFAST_DATABASE_URL names: `python -m controller.adapters.postgres.migrate`."""
    url = environment.get("HOLDFAST_DATABASE_URL")
    if not url:
        print("holdfast: set HOLDFAST_DATABASE_URL to the database to migrate", file=sys.stderr)
        return 2
    try:
        asyncio.run(upgrade(url))
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ))
