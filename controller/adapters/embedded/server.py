"""Spawns embedded server processes, which lock their data directory and end with this process."""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.adapters.embedded.free_port import free_port
from events.errors import HoldfastError

START_DEADLINE_S = 30.0  # enough for a broker with millions of messages, or a database in recovery
STOP_DEADLINE_S = 5.0
# how long to wait for the lock, which the child processes of a killed postgres hold for a moment
LOCK_WAIT_S = 3.0
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
    """A running embedded server: its address, its files and its process."""

    role: str  # nats, postgres or prometheus
    url: str
    port: int
    directory: Path
    log: Path
    process: subprocess.Popen[bytes]
    monitor: str = ""  # URL of nats-server's monitoring port; empty: none
    # settings that the server reports; empty: not read
    effective: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    async def wait(self) -> int:
        """Wait until the server has ended, and return its exit status."""
        while (status := self.process.poll()) is None:  # noqa: ASYNC110 (a child process has no event to wait for)
            await asyncio.sleep(POLL_S)
        return status

    async def stop(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Stop the server with SIGINT (for postgres, a fast shutdown), or kill it after the deadline; return its exit status."""
        if self.running:
            self.process.send_signal(signal.SIGINT)
            try:
                async with asyncio.timeout(deadline_s):
                    return await self.wait()
            except TimeoutError:
                self.process.kill()
        return await self.wait()

    async def kill(self) -> int:
        """Kill the server with SIGKILL, wait for its end, and return its exit status."""
        if self.running:
            self.process.kill()
        return await self.wait()


@contextlib.contextmanager
def directory_errors(directory: Path) -> Iterator[None]:
    """Raise ServerFailed, which names `directory`, for an OSError or ValueError from the `with` block."""
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
    """Start a child process that has the lock on `directory` and gets the signal `dies_by` when this process ends.

    Raise ServerDirectoryInUse if another server has the lock. Call this from the main thread, because the kernel sends the signal
    (PDEATHSIG) when the *thread* that forked exits.
    """
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await _lock(lock, directory)
        with log.open("ab") as output:
            return subprocess.Popen(  # noqa: ASYNC220 (the fork takes 1 ms, and asyncio's own needs a child watcher)
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=environment(),
                pass_fds=(lock, *fds),  # the server inherits the lock and has it until it ends
                start_new_session=True,  # so that Ctrl-C reaches only the parent process, which stops the servers in order
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
    """Return a preexec function for a child of the process `parent`. The child gets the signal `by` when its parent dies.

    If `parent` has died before the function runs, the child exits at once.
    """

    def preexec() -> None:
        if sys.platform == "linux":
            libc.prctl(PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:  # the parent died before prctl took effect
            os._exit(1)

    return preexec


def identity(user: str | None) -> dict[str, Any]:
    """Return the arguments of Popen that run a process as `user`; empty for None, which keeps this process's user."""
    if user is None:
        return {}
    entry = pwd.getpwnam(user)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def environment() -> dict[str, str]:
    """Return the few environment variables that an embedded server gets. All others could change its configuration."""
    kept = {name: os.environ[name] for name in ("PATH", "TZ", "TMPDIR") if name in os.environ}
    return {**kept, "LC_ALL": "C"}


async def wait_until_ready(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, what: str
) -> None:
    """Wait until `ready` returns True.

    If that takes too long, kill the process. Raise PortInUse if the process ended because its port was in use, and ServerFailed
    if it ended for another reason or was killed. The error has the last lines of the server's log, or names the log.
    """
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
    """Kill a server process that failed to start, and reap it."""
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
    """Raise PortInUse if `port` is in use. Port 0, which selects a free port, is never in use. `what` names the server."""
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
    """Start a server on `port`. If `port` is 0, start it on a free port.

    If another process binds the free port before the server does, try once more with another free port.
    """
    for _ in range(PORT_TRIES if not port else 0):
        with contextlib.suppress(PortInUse):
            return await start(free_port())
    return await start(port or free_port())
