"""An embedded server process: it dies with us, is stopped gracefully, and locks its data directory."""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import pwd
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.adapters.embedded.free_port import free_port
from events.errors import HoldfastError

START_DEADLINE_S = 30.0  # enough for a broker with millions of messages, or a database in recovery
STOP_DEADLINE_S = 5.0
LOCK_WAIT_S = 3.0  # the children of a killed postgres hold its directory for a moment longer
POLL_S = 0.004
PORT_TRIES = 2
PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


class ServerFailed(HoldfastError):
    """An embedded server did not start."""


class PortInUse(ServerFailed):
    """The port is taken by another process. Stop that process or choose another port."""


class ServerDirectoryInUse(ServerFailed):
    """Another fleet is running on this data directory. Stop it first or choose another --data."""


@dataclass
class EmbeddedServer:
    """A running embedded server."""

    role: str  # nats, postgres
    url: str
    port: int
    directory: Path
    log: Path
    process: subprocess.Popen[bytes]
    monitor: str = ""  # nats-server's own HTTP port
    effective: dict[str, Any] = field(default_factory=dict)  # settings as the server itself reports them

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    async def wait(self) -> int:
        """Return the exit status once the server has ended."""
        while (status := self.process.poll()) is None:  # noqa: ASYNC110 (a child has no flag)
            await asyncio.sleep(POLL_S)
        return status

    async def stop(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Stop gracefully (postgres: fast shutdown), or kill after the deadline; return the exit status."""
        if self.running:
            self.process.send_signal(signal.SIGINT)
            try:
                async with asyncio.timeout(deadline_s):
                    return await self.wait()
            except TimeoutError:
                self.process.kill()
        return await self.wait()

    async def kill(self) -> int:
        """Kill by SIGKILL, as a crash would, and reap the process."""
        if self.running:
            self.process.kill()
        return await self.wait()


@contextlib.contextmanager
def directory_errors(directory: Path) -> Iterator[None]:
    """Convert the system's errors about a directory. Raise ServerFailed."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ServerFailed(f"the directory {directory} cannot be used: {error}") from error


async def spawn(
    command: list[str],
    directory: Path,
    log: Path,
    *,
    user: str | None = None,
    fds: tuple[int, ...] = (),
    dies_by: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start a child that holds the lock on `directory` and dies with us. Raise DirectoryInUse.

    Call it from the main thread: PDEATHSIG fires when the *thread* that forked exits.
    """
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await _lock(lock, directory)
        with log.open("ab") as output:
            return subprocess.Popen(  # noqa: ASYNC220 (a fork of 1 ms; asyncio's own would need its watcher)
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=environment(),
                pass_fds=(lock, *fds),  # the server itself holds the lock, for as long as it lives
                preexec_fn=die_with(os.getpid(), dies_by),
                **identity(user),
            )
    finally:
        os.close(lock)


async def _lock(lock: int, directory: Path) -> None:
    try:
        async with asyncio.timeout(LOCK_WAIT_S):
            while True:
                try:
                    return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise ServerDirectoryInUse(
            f"a server is running on {directory}. {ServerDirectoryInUse.__doc__}"
        ) from None


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Return a preexec function that starts a new session, and arranges for a signal when `parent` dies."""

    def arrange() -> None:
        os.setsid()  # Ctrl-C is for this process, which stops the servers in order
        libc.prctl(PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:  # the parent died before prctl took effect
            os._exit(1)

    return arrange


def identity(user: str | None) -> dict[str, Any]:
    """Return Popen's arguments for running as `user` (None: as ourselves)."""
    if user is None:
        return {}
    entry = pwd.getpwnam(user)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def environment() -> dict[str, str]:
    """Return the part of our environment that an embedded server needs, without anything that would configure it."""
    kept = {name: os.environ[name] for name in ("PATH", "TZ", "TMPDIR") if name in os.environ}
    return {**kept, "LC_ALL": "C"}


async def wait_until_ready(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, what: str
) -> None:
    """Wait until `ready()`, or end the process. Raise ServerFailed or PortInUse, with the server's own message."""
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            while not ready():
                if process.poll() is not None:
                    raise _diagnosis(what, process.returncode, log)
                await asyncio.sleep(POLL_S)
    except BaseException as error:
        end(process)
        if isinstance(error, TimeoutError):
            late = f"{what} was not ready within {START_DEADLINE_S:g} s; its log is {log}"
            raise ServerFailed(late) from None
        raise


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that must not run, and reap it."""
    process.kill()
    process.wait()


def _diagnosis(what: str, status: int, log: Path) -> ServerFailed:
    said = log.read_bytes()[-8192:].decode(errors="replace").strip().splitlines()[-10:]
    if any("address already in use" in line.lower() for line in said):
        return PortInUse(f"{what} could not listen. {PortInUse.__doc__}")
    words = ("FATAL", "[FTL]", "[ERR]", "ERROR", "PANIC", "nats-server:")
    telling = [line for line in said if any(word in line for word in words)]
    last = (telling or said or ["its log is empty"])[-1]
    return ServerFailed(f"{what} ended with status {status} while starting: {last} (log: {log})")


def check_port(port: int, what: str) -> None:
    """Raise PortInUse if `port` is taken; 0 never is."""
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise PortInUse(
                f"port {port}, wanted for {what}, is taken by another process. Stop it or choose another port."
            ) from None


async def start_on_free_port(port: int, start: Callable[[int], Awaitable[EmbeddedServer]]) -> EmbeddedServer:
    """Start on `port`, or for 0 on a free one; retry if another process takes that before the server binds it."""
    for _ in range(PORT_TRIES if not port else 0):
        with contextlib.suppress(PortInUse):
            return await start(free_port())
    return await start(port or free_port())
