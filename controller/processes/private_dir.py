"""Restricts a fleet's directory to its user: folders 0700, files 0600.

New files get these permissions from the `umask` with which every process of a fleet starts (`controller.cli`). This module
restricts the files that older releases created.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MASK = 0o077  # the bits of group and others
FOLDERS = ("devices", "logs", "nats", "postgres", "run", "secrets", "spool")
FILES = ("demo.json", "fleet.json", "fleet.json.tmp", "lock", "up.log", "version")


def restrict(path: Path) -> list[str]:
    """Restrict a fleet's directory. Return the foreign entries in it; if there are any, the directory itself is not changed.

    A directory with foreign entries could be a home directory, or /tmp. The fleet's own files in it are restricted anyway.
    """
    foreign = sorted({entry.name for entry in path.iterdir()} - {*FOLDERS, *FILES})
    for name in FILES:
        _restrict(path / name)
    for name in FOLDERS:
        _restrict(path / name)
        for found in _below(path / name):
            _restrict(found)
    if not foreign:
        _restrict(path)
    return foreign if _is_open(path) else []


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        if Path(place).name == "data" and "PG_VERSION" in files:
            folders.clear()  # private already: PostgreSQL refuses to start otherwise
            continue
        yield from (Path(place) / name for name in (*folders, *files))


def _is_open(path: Path) -> bool:
    return bool(stat.S_IMODE(path.lstat().st_mode) & MASK)


def _restrict(path: Path) -> None:
    """Remove the permissions of group and others, if the file exists and belongs to this user."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if status.st_mode & MASK and not stat.S_ISLNK(status.st_mode):
            path.chmod(stat.S_IMODE(status.st_mode) & ~MASK)
