"""A database as a fleet's first start leaves it, made once for all testers and copied: a quarter of the work of a first start."""

import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from once import made_once

from controller.adapters.embedded.servers import start_postgres
from controller.adapters.postgres import migrate

NAME = "holdfast"  # the migrated database; the server makes any other that is asked for

_made: list[Path] = []


def make_once(own: Path, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """Make it, unless another tester has. `own`: this one's folder, in that of all testers of this run."""
    _made[:] = [made_once(own, "first-database", lambda directory: run(_make(directory)))]


async def _make(directory: Path) -> None:
    server = await start_postgres(directory, database=NAME)
    try:
        await migrate.upgrade(server.url)
    finally:
        await server.stop()


def lay(directory: Path) -> Path:
    """Lay a copy of it where a server will start, unless one has started there before. Return the directory."""
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-pR", str(_made[0]), str(directory)], check=True)
        (directory / "postgres.log").unlink()
    return directory
