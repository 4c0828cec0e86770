"""A database as a fleet's first start leaves it, made once for all testers and copied: a quarter of the work of a first start."""

import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from once import made_once

from controller.adapters.embedded import cluster
from controller.adapters.embedded.accounts import DatabaseAccounts, DatabaseUrls
from controller.adapters.embedded.postgres import opened
from controller.adapters.embedded.servers import EmbeddedServer, start_postgres
from controller.adapters.postgres import migrate

NAME = "holdfast"  # the migrated database
TESTER = "tester"  # a superuser, as no fleet has one: to clone databases, and to damage them
ACCOUNTS = "accounts.json"

_made: list[Path] = []


def make_once(own: Path, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """Make it, unless another tester has. `own`: this one's folder, in that of all testers of this run."""
    _made[:] = [made_once(own, "first-database", lambda directory: run(_make(directory)))]


async def _make(directory: Path) -> None:
    server = await start_postgres(directory)
    try:
        await migrate.upgrade(urls(server).owner)
    finally:
        await server.stop()
    await as_superuser(directory, f"CREATE ROLE {TESTER} SUPERUSER LOGIN PASSWORD '{TESTER}'")


async def as_superuser(directory: Path, *statements: str, database: str = "postgres") -> str:
    """Do to a database that nobody serves what only its superuser may; return what is printed."""
    async with opened(directory) as place:
        return await cluster.administer(place, statements, database=database)


def urls(server: EmbeddedServer) -> DatabaseUrls:
    """Return the URLs of a server's own accounts."""
    return DatabaseAccounts.kept(server.directory / ACCOUNTS).urls(server.url)


def tester_url(server: EmbeddedServer, database: str = "postgres") -> str:
    """Return the URL of who may do anything to a server whose directory was laid."""
    return f"postgresql://{TESTER}:{TESTER}@127.0.0.1:{server.port}/{database}"


def lay(directory: Path, accounts: Path | None = None) -> Path:
    """Lay a copy of it where a server will start, unless one has started there before. Return the directory.

    `accounts` is where its passwords are wanted, if not beside it.
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
    """Lay a copy of it where `holdfast up --data` will find it."""
    lay(data / "postgres", data / "secrets" / "postgres.json")
