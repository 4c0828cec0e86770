"""Which processes of a fleet run on this host, and where do they answer? One small file each under DIR/run.

A hint for people and for `holdfast status`, never a source of truth: the journal says who is alive.
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
    url: str  # where it answers: its admin port, or the server's own address
    console: str = ""  # where a browser shows the fleet, if it has a console


def announce(
    directory: Path, role: str, name: str, url: str, pid: int | None = None, *, console: str = ""
) -> Path:
    """Write this process's file, whole or not at all, and return its path. On a full disk there is none."""
    path = directory / "run" / f"{name}.json"
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    said = json.dumps(asdict(Presence(role, name, os.getpid() if pid is None else pid, url, console)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(said)
        fresh.replace(path)
    except OSError as error:
        import structlog  # where a worker reads this first, before it has left rich out

        structlog.get_logger(__name__).warning("presence_not_shown", file=str(path), error=str(error))
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
    return path


def withdraw(path: Path) -> None:
    """Remove a process's file at its end, unless it is a successor's by now."""
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text())["pid"] == os.getpid():
            path.unlink()


def present(directory: Path) -> list[Presence]:
    """Return every process that has announced itself and still lives."""
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
    """Return whether there is a process of this number on this host."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
