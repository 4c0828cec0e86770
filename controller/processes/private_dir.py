"""A fleet's directory is its own user's alone: folders 0700, files 0600.

What is made anew is so because of the `umask` with which every process of a fleet begins (`controller.cli`); what a
release before has left is shut here.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MASK = 0o077  # the bits of group and others
FOLDERS = ("devices", "logs", "nats", "postgres", "run", "secrets", "spool")
FILES = ("demo.json", "fleet.json", "fleet.json.tmp", "lock", "up.log", "version")


def shut(path: Path) -> list[str]:
    """Shut a fleet's directory, and return what in it is not the fleet's: then the directory itself stays as it is.

    It could be somebody's home, or /tmp; but what in it is the fleet's is shut all the same.
    """
    strangers = sorted({entry.name for entry in path.iterdir()} - {*FOLDERS, *FILES})
    for name in FILES:
        _shut(path / name)
    for name in FOLDERS:
        _shut(path / name)
        for found in _below(path / name):
            _shut(found)
    if not strangers:
        _shut(path)
    return strangers if _open(path) else []


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        if Path(place).name == "data" and "PG_VERSION" in files:
            folders.clear()  # PostgreSQL starts on nothing that others could read
            continue
        yield from (Path(place) / name for name in (*folders, *files))


def _open(path: Path) -> bool:
    return bool(stat.S_IMODE(path.lstat().st_mode) & MASK)


def _shut(path: Path) -> None:
    """Take the rights of group and others, if there is such a thing, and it is ours to say."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if status.st_mode & MASK and not stat.S_ISLNK(status.st_mode):
            path.chmod(stat.S_IMODE(status.st_mode) & ~MASK)
