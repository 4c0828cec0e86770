"""The files of the embedded database, and what is done to them while it serves nobody: making them, and administration.

There is a superuser, since every PostgreSQL has one, but nobody can connect as it. What only a superuser may do is done by
a server of one session (`postgres --single`), which talks to us alone and has no door.
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
DOORS = (
    "# written by holdfast at each start\nhost all all 127.0.0.1/32 scram-sha-256\n"  # replication: nobody
)
_SINGLE = {"exit_on_error": "on", "log_min_error_statement": "panic"}


@dataclass(frozen=True)
class ClusterPlace:
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
        if self.user is None or hidden_by(self.directory / part, self.user) is None:
            return str(self.directory / part)
        return f"/proc/self/fd/{self.held}/{part}"

    def program(self, name: str) -> str:
        """Return the path of one of PostgreSQL's programs."""
        return str(self.install / "bin" / name)

    @property
    def made(self) -> bool:
        """Whether there is a database already."""
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


def write_doors(place: ClusterPlace) -> str:
    """Write down who may come in, beside the data, so that no backup of these brings other doors back; return its name."""
    path = place.directory / "pg_hba.conf"
    fresh = path.with_suffix(".tmp")
    fresh.write_text(DOORS)
    fresh.chmod(0o600)
    if place.user is not None:
        entry = pwd.getpwnam(place.user)
        os.chown(fresh, entry.pw_uid, entry.pw_gid)
    fresh.replace(path)
    return place.name(path.name)


async def make(place: ClusterPlace, database: str, accounts: DatabaseAccounts) -> None:
    """Make a cluster beside `data`, then move it there whole: a killed start leaves nothing half-made.

    Each one works in a directory of its own: the last processes of one that was killed may still write in theirs.
    Raise ServerFailed.
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
    await asyncio.to_thread(libc.syncfs, place.held)  # no step waited for the disk; once for all is 50 ms
    partial.rename(place.directory / "data")


async def set_up(place: ClusterPlace, database: str, accounts: DatabaseAccounts) -> None:
    """Give a cluster that is there our accounts, by our passwords, and the database that they use. Raise ServerFailed."""
    wanted = [*cluster_sql.accounts(accounts.verifiers()), "SELECT datname FROM pg_database"]
    if f'datname = "{database}"' not in await administer(place, wanted):
        await administer(place, [f'CREATE DATABASE "{database}"'])
    await administer(place, cluster_sql.rights(database), database=database)
    mark = place.directory / f"database.{database}"
    mark.unlink(missing_ok=True)  # of a release before, which believed it


async def administer(
    place: ClusterPlace, statements: Iterable[str], *, data: str = "data", database: str = "postgres"
) -> str:
    """Run statements as the superuser, on a cluster that no server runs on, and return what they gave. Raise ServerFailed.

    What is said goes through a pipe: nobody else sees it, and no log has it.
    """
    script = "".join(f"{statement};\n\n" for statement in statements)  # an empty line ends a statement
    settings = {**_SINGLE, "fsync": "on" if data == "data" else "off"}
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    command = [place.program("postgres"), "--single", "-j", "-D", place.name(data), *flags, database]
    return await run(command, "postgres --single", user=place.user, fds=(place.held,), said=script)


async def admits(place: ClusterPlace, port: int, database: str, accounts: DatabaseAccounts) -> bool:
    """Say whether the database lets its owner in, by the password that we know, and is set up as this version wants it."""
    psql = [place.program("psql"), "-X", "-q", "-A", "-t", "-w", "-h", "127.0.0.1", "-p", str(port)]
    ask = "SELECT shobj_description(oid, 'pg_database') FROM pg_database WHERE datname = current_database()"
    secret = {"PGPASSWORD": accounts.passwords[OWNER]}  # `ps` shows arguments to everybody, but not this
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
    """Run one of PostgreSQL's programs to its end and return what it printed. Raise ServerFailed."""
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
        if process.returncode is None:  # too slow, or nobody wants it any more
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise ServerFailed(f"{what} failed: {_complaint(output.decode(errors='replace'))}")
    return output.decode(errors="replace")


def _complaint(output: str) -> str:
    """Return the line that says what is wrong: initdb tells all that went well before it."""
    lines = output.strip().splitlines() or ["it said nothing"]
    return next((line for line in lines if "FATAL" in line or "error:" in line), lines[-1]).strip()
