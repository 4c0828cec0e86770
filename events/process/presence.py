"""The registry of a fleet's processes on this host: one small file per process in DIR/run.

The registry is a hint for operators and `holdfast status`, and never a source of truth. Which workers are alive follows from
the journal.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Presence:
    """One registered process of the fleet: its role, name, pid and URLs."""

    role: str  # nats, postgres, controller, projector, frontend, worker, watch
    name: str  # w0, frontend-1 …
    pid: int
    url: str  # URL of the process's admin port, or the server's own address
    console: str = ""  # URL of the process's web console; empty: it has none


def announce(
    directory: Path, role: str, name: str, url: str, pid: int | None = None, *, console: str = ""
) -> Path:
    """Write the file of this process, or of the process `pid`, atomically, and return the file's path.

    If the file cannot be written, for example because the disk is full, log a warning.
    """
    path = directory / "run" / f"{name}.json"
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    content = json.dumps(asdict(Presence(role, name, os.getpid() if pid is None else pid, url, console)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(content)
        fresh.replace(path)
    except OSError as error:
        import structlog  # imported here, because a worker imports this module before it excludes the package rich

        structlog.get_logger(__name__).warning("presence_not_shown", file=str(path), error=str(error))
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
    return path


def withdraw(path: Path) -> None:
    """Remove the file of this process, unless a later process with the same name has replaced it."""
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text())["pid"] == os.getpid():
            path.unlink()


def present(directory: Path) -> list[Presence]:
    """Return every registered process that is still alive."""
    found = []
    for path in sorted((directory / "run").glob("*.json")):
        try:
            presence = Presence(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if alive(presence.pid):
            found.append(presence)
    return found


def alive(pid: int) -> bool:
    """Return whether this host has a process with this pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
