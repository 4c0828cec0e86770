"""A database as a fleet's first start creates it, made once and copied, in a quarter of the time."""

import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from once import made_once

from controller.adapters.embedded import cluster
from controller.adapters.embedded.accounts import DatabaseAccounts, DatabaseUrls
from controller.adapters.embedded.postgres import opened, start_postgres
from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.postgres import migrate

NAME = "holdfast"  # the migrated database
TESTER = "tester"  # a superuser, which no fleet has: to clone databases, and to damage them
ACCOUNTS = "accounts.json"

_made: list[Path] = []


def make_once(own: Path, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """Create it, unless another xdist worker has. `own`: this worker's folder, inside that of all workers of this run."""
    _made[:] = [made_once(own, "first-database", lambda directory: run(_make(directory)))]


async def _make(directory: Path) -> None:
    server = await start_postgres(directory)
    try:
        await migrate.upgrade(urls(server).owner)
    finally:
        await server.stop()
    await as_superuser(directory, f"CREATE ROLE {TESTER} SUPERUSER LOGIN PASSWORD '{TESTER}'")


async def as_superuser(directory: Path, *statements: str, database: str = "postgres") -> str:
    """Run statements that only the superuser may run, on a database without a server; return what is printed."""
    async with opened(directory) as place:
        return await cluster.administer(place, statements, database=database)


def urls(server: EmbeddedServer) -> DatabaseUrls:
    """Return the URLs of a server's own accounts."""
    return DatabaseAccounts.kept(server.directory / ACCOUNTS).urls(server.url)


def tester_url(server: EmbeddedServer, database: str = "postgres") -> str:
    """Return the URL of the superuser of a server with a laid directory."""
    return f"postgresql://{TESTER}:{TESTER}@127.0.0.1:{server.port}/{database}"


def lay(directory: Path, accounts: Path | None = None) -> Path:
    """Copy the database to where a server will start, unless one has started there before. Return the directory.

    `accounts` is the folder for its passwords, if not beside it.
    """
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-pR", str(_made[0]), str(directory)], check=True)
        (directory / "postgres.log").unlink()
        if accounts is not None:
            accounts.parent.mkdir(exist_ok=True)
            (directory / ACCOUNTS).rename(accounts)
    return directory


def lay_in_fleet(data: Path) -> None:
    """Copy the database to where `holdfast up --data` expects it."""
    lay(data / "postgres", data / "secrets" / "postgres.json")
