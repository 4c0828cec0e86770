"""The data directory of a fleet: its lock, its version, its file permissions, and the paths in it."""

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from events.errors import HoldfastError
from events.json_types import Json
from events.process.presence import alive

VERSION = 1


class DirectoryInUse(HoldfastError):
    """Another `holdfast up` is running on this data directory. Stop it, or choose another directory with --data."""


class DirectoryTooNew(HoldfastError):
    """This data directory was written by a newer version of Holdfast. Upgrade, or choose another directory with --data."""


class NoFleet(HoldfastError):
    """No fleet runs on this data directory."""


class FleetDir:
    """The data directory of a fleet, with its lock if this process holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nats = path / "nats"  # directory of the broker's data, including the journal
        self.postgres = path / "postgres"  # directory of the database's data
        # file of the database accounts' passwords, outside the database's directory, because that may be lost or restored
        self.accounts = path / "secrets" / "postgres.json"
        # file of the fleet key; frontends and workers must prove that they have the key
        self.key = path / "secrets" / "fleet.key"
        # a subdirectory per process, for the process's unacknowledged facts and its last acknowledged event
        self.spools = path / "spool"
        self.broker_keys = path / "secrets" / "nats"  # directory of the nkey seeds of all broker accounts
        self.logs = path / "logs"  # directory with the log file of every process
        self._lock: int | None = None

    def take(self) -> None:
        """Create and lock the directory, and delete the files that an earlier run has left in its folder `run`.

        Raise DirectoryInUse if another `holdfast up` holds the lock, and HoldfastError if the directory cannot be used. Raise
        DirectoryTooNew if a newer version of Holdfast wrote the directory, or if its file `version` holds no number.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise HoldfastError(f"the data directory {self.path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DirectoryInUse(f"{self.path}: {DirectoryInUse.__doc__}") from error
        self._check_version()
        for stale in (self.path / "run").glob("*"):
            stale.unlink(missing_ok=True)

    def _check_version(self) -> None:
        path = self.path / "version"
        if not path.exists():
            path.write_text(f"{VERSION}\n")
            return
        text = path.read_text().strip()
        if not text.isdigit() or int(text) > VERSION:
            raise DirectoryTooNew(
                f"{self.path} has version {text}, this is {VERSION}: {DirectoryTooNew.__doc__}"
            )

    def remember(self, **facts: object) -> None:
        """Store the fleet's addresses in `fleet.json`, where other commands find them. Raise OSError if the disk is full."""
        fresh = self.path / "fleet.json.tmp"
        fresh.unlink(missing_ok=True)
        fresh.touch(0o600)  # a database URL may contain a password
        fresh.write_text(json.dumps(facts, indent=1))
        fresh.replace(self.path / "fleet.json")  # atomic, because another command may read the file meanwhile

    def recall(self) -> Json:
        """Return what `remember` stored. Raise NoFleet if the file is missing or the process that wrote it no longer runs."""
        try:
            known: Json = json.loads((self.path / "fleet.json").read_text())
        except (OSError, ValueError):
            known = {}
        if not known or not alive(known.get("pid", os.getpid())):
            raise NoFleet(
                f"{self.path}: {NoFleet.__doc__} Start one with `holdfast up`, or select another directory with --data."
            )
        return known


MASK = 0o077  # the permission bits of group and others
FOLDERS = ("devices", "logs", "nats", "postgres", "run", "secrets", "spool")
FILES = ("demo.json", "fleet.json", "fleet.json.tmp", "lock", "up.log", "version")


def restrict(path: Path) -> list[str]:
    """Remove the permissions of group and others from a fleet's directory and the fleet's files in it.

    Entries that are not a fleet's are foreign. A directory with foreign entries could be a home directory or /tmp, so the
    permissions of the directory itself are kept. If other users can access this directory, return the names of the foreign
    entries. In all other cases, return an empty list.

    New files are private by the `umask` of a fleet's processes (`controller.cli`), but files of older releases may not be.
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
            folders.clear()  # always private, because PostgreSQL refuses to start otherwise
            continue
        yield from (Path(place) / name for name in (*folders, *files))


def _is_open(path: Path) -> bool:
    return bool(stat.S_IMODE(path.lstat().st_mode) & MASK)


def _restrict(path: Path) -> None:
    """Remove the permissions of group and others from a file, if it exists and belongs to this user."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if status.st_mode & MASK and not stat.S_ISLNK(status.st_mode):
            path.chmod(stat.S_IMODE(status.st_mode) & ~MASK)
