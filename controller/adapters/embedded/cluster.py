"""Creates the files of the embedded database, and administers it while no server runs on them.

No client can connect as PostgreSQL's superuser. Superuser statements therefore run in a single-user server
(`postgres --single`), which reads them from this process and accepts no connections.
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
# no replication access
HBA_RULES = "# written by holdfast at each start\nhost all all 127.0.0.1/32 scram-sha-256\n"
_SINGLE = {"exit_on_error": "on", "log_min_error_statement": "panic"}


@dataclass(frozen=True)
class ClusterPlace:
    """The location of one embedded database: its directory, the PostgreSQL installation, and the user that runs the server."""

    install: Path  # directory of PostgreSQL's programs
    directory: Path
    held: int  # an open descriptor of `directory`, which `name` needs
    user: str | None  # the user that runs the server; None: the user of this process

    def name(self, part: str) -> str:
        """Return a path by which `user` can open the file `part` of this directory.

        If `user` may not enter a parent directory, for example root's home (mode 0700), the path leads through the open
        descriptor `held` of `directory`. The server's process inherits that descriptor.
        """
        if self.user is None or hidden_by(self.directory / part, self.user) is None:
            return str(self.directory / part)
        return f"/proc/self/fd/{self.held}/{part}"

    def program(self, name: str) -> str:
        """Return the path of the PostgreSQL program `name`."""
        return str(self.install / "bin" / name)

    @property
    def made(self) -> bool:
        """Whether `directory` already contains a PostgreSQL data directory."""
        return (self.directory / "data" / "PG_VERSION").exists()


def hidden_by(path: Path, user: str) -> Path | None:
    """Return the topmost directory above `path` that `user` cannot enter; None if `user` can enter all of them."""
    entry = pwd.getpwnam(user)
    for parent in reversed(path.resolve().parents):
        status = parent.stat()
        owner, group = status.st_uid == entry.pw_uid, status.st_gid == entry.pw_gid
        if not status.st_mode & (0o100 if owner else 0o010 if group else 0o001):
            return parent
    return None


def write_hba_file(place: ClusterPlace) -> str:
    """Write the file with the server's access rules, and return the path by which the server can open it.

    The file is outside the data directory, so that restoring a backup of the data does not change the rules.
    """
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
    """Create a PostgreSQL data directory under a temporary name, then rename it to `data`.

    A call that is killed therefore leaves no incomplete `data`. Each call uses a new temporary directory, because processes of an
    earlier, killed call may still write to the directory of that call. Raise ServerFailed if a step fails.
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
    # one sync of 50 ms for all steps before, which did not sync
    await asyncio.to_thread(libc.syncfs, place.held)
    partial.rename(place.directory / "data")


async def set_up(place: ClusterPlace, database: str, accounts: DatabaseAccounts) -> None:
    """Create Holdfast's accounts and database in an existing data directory, or correct their passwords and rights.

    No server may run on the data directory. Raise ServerFailed if a step fails.
    """
    wanted = [*cluster_sql.accounts(accounts.verifiers()), "SELECT datname FROM pg_database"]
    if f'datname = "{database}"' not in await administer(place, wanted):
        await administer(place, [f'CREATE DATABASE "{database}"'])
    await administer(place, cluster_sql.rights(database), database=database)
    mark = place.directory / f"database.{database}"
    mark.unlink(missing_ok=True)  # a file of older releases, which would otherwise trust the old setup


async def administer(
    place: ClusterPlace, statements: Iterable[str], *, data: str = "data", database: str = "postgres"
) -> str:
    """Run statements as the superuser on the PostgreSQL data directory `data`, and return their output.

    No server may run on this directory. The statements are passed through a pipe, so that no other process
    sees them and no log contains them. Raise ServerFailed if the single-user server fails or takes too long.
    """
    script = "".join(f"{statement};\n\n" for statement in statements)  # an empty line ends a statement
    settings = {**_SINGLE, "fsync": "on" if data == "data" else "off"}
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    command = [place.program("postgres"), "--single", "-j", "-D", place.name(data), *flags, database]
    return await run(command, "postgres --single", user=place.user, fds=(place.held,), said=script)


async def admits(place: ClusterPlace, port: int, database: str, accounts: DatabaseAccounts) -> bool:
    """Return whether the database's owner can log in and the accounts have the rights that this release grants.

    Setting up the rights writes `cluster_sql.EDITION` as the comment of the database. A database with another comment was set up
    by another release, with other rights.
    """
    psql = [place.program("psql"), "-X", "-q", "-A", "-t", "-w", "-h", "127.0.0.1", "-p", str(port)]
    ask = "SELECT shobj_description(oid, 'pg_database') FROM pg_database WHERE datname = current_database()"
    # other users can see a process's arguments, but not its environment
    secret = {"PGPASSWORD": accounts.passwords[OWNER]}
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
    """Run a PostgreSQL program to its end and return its output.

    `what` names the program in errors, `said` is the program's standard input, and `secret` adds environment variables. Raise
    ServerFailed if the program fails or takes too long.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE if said else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env={**environment(), **(secret or {})},
        pass_fds=fds,
        start_new_session=True,
        preexec_fn=die_with(os.getpid()),
        **identity(user),
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(said.encode() or None), START_DEADLINE_S)
    except TimeoutError:
        raise ServerFailed(f"{what} did not end within {START_DEADLINE_S:g} s") from None
    finally:
        if process.returncode is None:  # the program took too long, or the caller was cancelled
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise ServerFailed(f"{what} failed: {_complaint(output.decode(errors='replace'))}")
    return output.decode(errors="replace")


def _complaint(output: str) -> str:
    """Return the line of a program's output that contains the error, or the last line.

    initdb first prints the steps that have succeeded, so the error is not in the first line.
    """
    lines = output.strip().splitlines() or ["no output"]
    return next((line for line in lines if "FATAL" in line or "error:" in line), lines[-1]).strip()
