"""The registry of a fleet's processes on this host: one small file each under DIR/run.

A hint for operators and `holdfast status`, never a source of truth: the journal says which workers are alive.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Presence:
    """One process of the fleet."""

    role: str  # nats, postgres, controller, projector, frontend, worker, watch
    name: str  # w0, frontend-1 …
    pid: int
    url: str  # its admin port, or the server's own address
    console: str = ""  # the URL of its web console, if it has one


def announce(
    directory: Path, role: str, name: str, url: str, pid: int | None = None, *, console: str = ""
) -> Path:
    """Write this process's file atomically, and return its path. On a full disk the file is missing."""
    path = directory / "run" / f"{name}.json"
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    content = json.dumps(asdict(Presence(role, name, os.getpid() if pid is None else pid, url, console)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(content)
        fresh.replace(path)
    except OSError as error:
        import structlog  # not at the top: a worker imports this module before it has excluded rich

        structlog.get_logger(__name__).warning("presence_not_shown", file=str(path), error=str(error))
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
    return path


def withdraw(path: Path) -> None:
    """Remove this process's file, unless it already belongs to a successor."""
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text())["pid"] == os.getpid():
            path.unlink()


def present(directory: Path) -> list[Presence]:
    """Return every announced process that is still alive."""
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
