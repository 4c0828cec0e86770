"""The files of the embedded database: creation, and administration while no server runs on them.

Every PostgreSQL has a superuser, but here nothing can connect as it. Superuser statements run in a single-session server
(`postgres --single`), which is connected to this process only and accepts no connections.
"""

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from controller.adapters.embedded import cluster_sql
from controller.adapters.embedded.accounts import DatabaseAccounts
from controller.adapters.embedded.server import (
    START_DEADLINE_S,
    ServerFailed,
    die_with,
    environment,
    identity,
    libc,
)
from controller.read_model.grants import OWNER

SUPERUSER = "postgres"
HBA_RULES = (
    "# written by holdfast at each start\nhost all all 127.0.0.1/32 scram-sha-256\n"  # no replication access
)
_SINGLE = {"exit_on_error": "on", "log_min_error_statement": "panic"}


@dataclass(frozen=True)
class ClusterPlace:
    """The location of one database. `held` is the descriptor of its open directory: see `name`."""

    install: Path
    directory: Path
    held: int
    user: str | None

    def name(self, part: str) -> str:
        """Return a path of `part` that `user` can open.

        No other user can enter a directory below root's home (0700) by its path. The user can enter it through a descriptor
        that was opened before the change of user.
        """
        if self.user is None or hidden_by(self.directory / part, self.user) is None:
            return str(self.directory / part)
        return f"/proc/self/fd/{self.held}/{part}"

    def program(self, name: str) -> str:
        """Return the path of one of PostgreSQL's programs."""
        return str(self.install / "bin" / name)

    @property
    def made(self) -> bool:
        """Whether a database exists already."""
        return (self.directory / "data" / "PG_VERSION").exists()


def hidden_by(path: Path, user: str) -> Path | None:
    """Return the first directory above `path` that `user` cannot enter."""
    entry = pwd.getpwnam(user)
    for parent in reversed(path.resolve().parents):
        status = parent.stat()
        owner, group = status.st_uid == entry.pw_uid, status.st_gid == entry.pw_gid
        if not status.st_mode & (0o100 if owner else 0o010 if group else 0o001):
            return parent
    return None


def write_hba_file(place: ClusterPlace) -> str:
    """Write the access rules beside the data, so that restoring a backup of the data keeps them; return the file name."""
    path = place.directory / "pg_hba.conf"
    fresh = path.with_suffix(".tmp")
    fresh.write_text(HBA_RULES)
    fresh.chmod(0o600)
    if place.user is not None:
        entry = pwd.getpwnam(place.user)
        os.chown(fresh, entry.pw_uid, entry.pw_gid)
    fresh.replace(path)
    return place.name(path.name)


async def make(place: ClusterPlace, database: str, accounts: DatabaseAccounts) -> None:
    """Create a cluster beside `data`, then move it there as a whole: a killed start leaves no incomplete cluster.

    Each call works in its own directory: the last processes of a killed call may still write to theirs. Raise ServerFailed.
    """
    for left in place.directory.glob("data.partial*"):
        shutil.rmtree(left, ignore_errors=True)
    partial = place.directory / f"data.partial.{os.getpid()}.{time.monotonic_ns()}"
    options = ["-A", "reject", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"]
    options += ["-c", "dynamic_shared_memory_type=mmap"]
    command = [place.program("initdb"), "-D", place.name(partial.name), "-U", SUPERUSER, *options]
    await run(command, "initdb", user=place.user, fds=(place.held,))
    made = [*cluster_sql.accounts(accounts.verifiers()), f'CREATE DATABASE "{database}"']
    await administer(place, made, data=partial.name)
    await administer(place, cluster_sql.rights(database), data=partial.name, database=database)
    await asyncio.to_thread(libc.syncfs, place.held)  # the steps above did not sync; one sync takes 50 ms
    partial.rename(place.directory / "data")


async def set_up(place: ClusterPlace, database: str, accounts: DatabaseAccounts) -> None:
    """Give an existing cluster our accounts, with our passwords, and their database. Raise ServerFailed."""
    wanted = [*cluster_sql.accounts(accounts.verifiers()), "SELECT datname FROM pg_database"]
    if f'datname = "{database}"' not in await administer(place, wanted):
        await administer(place, [f'CREATE DATABASE "{database}"'])
    await administer(place, cluster_sql.rights(database), database=database)
    mark = place.directory / f"database.{database}"
    mark.unlink(missing_ok=True)  # written by an older release, which relied on it


async def administer(
    place: ClusterPlace, statements: Iterable[str], *, data: str = "data", database: str = "postgres"
) -> str:
    """Run statements as the superuser, on a cluster without a running server, and return their output. Raise ServerFailed.

    The statements go through a pipe, so no other process sees them and no log contains them.
    """
    script = "".join(f"{statement};\n\n" for statement in statements)  # an empty line ends a statement
    settings = {**_SINGLE, "fsync": "on" if data == "data" else "off"}
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    command = [place.program("postgres"), "--single", "-j", "-D", place.name(data), *flags, database]
    return await run(command, "postgres --single", user=place.user, fds=(place.held,), said=script)


async def admits(place: ClusterPlace, port: int, database: str, accounts: DatabaseAccounts) -> bool:
    """Return whether the owner can log in with our password, and the database is set up as this version requires."""
    psql = [place.program("psql"), "-X", "-q", "-A", "-t", "-w", "-h", "127.0.0.1", "-p", str(port)]
    ask = "SELECT shobj_description(oid, 'pg_database') FROM pg_database WHERE datname = current_database()"
    secret = {"PGPASSWORD": accounts.passwords[OWNER]}  # `ps` shows arguments to every user, but not this
    try:
        edition = await run([*psql, "-U", OWNER, "-d", database, "-c", ask], "psql", secret=secret)
    except ServerFailed:
        return False
    return edition.strip() == cluster_sql.EDITION


async def run(
    command: list[str],
    what: str,
    *,
    user: str | None = None,
    fds: tuple[int, ...] = (),
    said: str = "",
    secret: dict[str, str] | None = None,
) -> str:
    """Run one of PostgreSQL's programs to its end and return its output. Raise ServerFailed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE if said else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env={**environment(), **(secret or {})},
        pass_fds=fds,
        preexec_fn=die_with(os.getpid()),
        **identity(user),
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(said.encode() or None), START_DEADLINE_S)
    except TimeoutError:
        raise ServerFailed(f"{what} did not end within {START_DEADLINE_S:g} s") from None
    finally:
        if process.returncode is None:  # too slow, or the caller was cancelled
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise ServerFailed(f"{what} failed: {_complaint(output.decode(errors='replace'))}")
    return output.decode(errors="replace")


def _complaint(output: str) -> str:
    """Return the line with the error: initdb first prints all successful steps."""
    lines = output.strip().splitlines() or ["no output"]
    return next((line for line in lines if "FATAL" in line or "error:" in line), lines[-1]).strip()
