"""Bring a database to the version that this code needs, or back.

The common case, a database that is up to date, is answered by one query, before Alembic is imported: a fleet's start
should not wait for it.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import asyncpg

from controller.adapters.names import HEAD, SCHEMA
from controller.adapters.pg_link import AWAY, Link, masked, plain
from controller.ports import StoreUnavailable
from events.errors import HoldfastError

LOCK = 0x0_4F1D_FA57  # one migration at a time: an advisory lock of the database
LOCK_S = 60  # how long to wait for another migration, or for a table that somebody holds


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

    address = (
        plain(url)
        .replace("postgres://", "postgresql://")
        .replace("postgresql://", "postgresql+asyncpg://", 1)
    )
    settings = {"search_path": schema, "lock_timeout": f"{LOCK_S}s"}
    engine = create_async_engine(
        address, poolclass=NullPool, connect_args={"server_settings": settings, "timeout": 10}
    )
    try:
        async with engine.begin() as connection:
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK})"))
            await connection.execute(text(f'CREATE SCHEMA IF NOT EXISTS "{schema}"'))
            await connection.run_sync(_alembic, schema, to, up)
    except (DBAPIError, *AWAY) as error:
        cause = error.orig.__cause__ if isinstance(error, DBAPIError) and error.orig else error
        if isinstance(cause, (*AWAY, asyncpg.LockNotAvailableError)):
            raise StoreUnavailable(
                f"{masked(url)} cannot be migrated now: {cause}. {StoreUnavailable.__doc__}"
            ) from error
        raise
    finally:
        await engine.dispose()


def _alembic(connection: Any, schema: str, to: str, up: bool) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[2] / "migrations"))
    config.attributes.update(connection=connection, schema=schema)
    (command.upgrade if up else command.downgrade)(config, to)


def main(arguments: list[str]) -> int:
    """Migrate the database named by the one argument: `python -m controller.adapters.migrate URL`."""
    if len(arguments) != 1:
        print("holdfast: give one database URL", file=sys.stderr)
        return 2
    try:
        asyncio.run(upgrade(arguments[0]))
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
