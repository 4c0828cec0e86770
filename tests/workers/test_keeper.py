"""The keeper: a killed worker's connections end before its memory is freed, without leftovers."""

import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from workers import keeper

ROOT = Path(__file__).parents[2]
HEAP_MB = 64
TRIES = 10
Eventually = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine not in keeper.MACHINES,
    reason="needs the keeper: run it on Linux, on x86-64 with glibc",
)

WORKER = """
import os, signal, socket, sys, threading
from workers import keeper
print(keeper.start() if sys.argv[1] == "kept" else 0, flush=True)
heap = b"x" * (int(sys.argv[2]) << 20)
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
connection = socket.create_connection(("127.0.0.1", int(sys.argv[3])))
connection.send(b"here")
exec(sys.argv[4])
"""
WAIT = "signal.pause()"


@dataclass
class Started:
    """A process with a heap and a connection, like a worker."""

    process: subprocess.Popen[str]
    keeper: psutil.Process | None
    connection: socket.socket


Start = Callable[..., Started]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start("kept", mb, then)` starts a process that connects and then executes `then`."""
    started: list[Started] = []

    def one(kept: str, mb: int = 1, then: str = WAIT) -> Started:
        with socket.create_server(("127.0.0.1", 0)) as server:
            command = [sys.executable, "-c", WORKER, kept, str(mb), str(server.getsockname()[1]), then]
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            server.settimeout(20)
            connection = server.accept()[0]
        connection.settimeout(20)
        assert connection.recv(4) == b"here"
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        started.append(Started(process, psutil.Process(pid) if pid else None, connection))
        return started[-1]

    yield one
    for each in started:
        each.connection.close()
        each.process.kill()
        each.process.communicate()


def ended(process: psutil.Process | None) -> bool:
    """Whether a process has ended, reaped or not."""
    assert process is not None
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def memory_mb(process: psutil.Process | None) -> int:
    """Return a process's memory in MB; 0 if it has ended."""
    assert process is not None
    try:
        return int(process.memory_info().rss) >> 20
    except psutil.NoSuchProcess:
        return 0


async def test_a_killed_process_closes_its_connections_before_its_memory_is_freed(
    start: Start, eventually: Eventually
) -> None:
    """The keeper frees the memory a tenth of a second later: a busy machine may look too late."""
    left: list[int] = []
    while max(left, default=0) < HEAP_MB and len(left) < TRIES:
        one = start("kept", HEAP_MB)
        one.process.kill()
        assert one.connection.recv(1) == b""
        left.append(memory_mb(one.keeper))
        await eventually(lambda one=one: ended(one.keeper))
        assert memory_mb(one.keeper) == 0
    assert max(left) >= HEAP_MB, left


ENDS = {
    "killed": (WAIT, -signal.SIGKILL),
    "by SIGTERM": (WAIT, -signal.SIGTERM),
    "normally": ("sys.stdin.readline()", 0),
    "by os._exit": ("sys.stdin.readline(); os._exit(4)", 4),
    "by an exception": ("sys.stdin.readline(); raise SystemExit(1)", 1),
    "crashed": ("sys.stdin.readline(); os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ENDS)
async def test_the_keeper_ends_when_its_process_ends_for_any_reason(
    way: str, start: Start, eventually: Eventually
) -> None:
    then, status = ENDS[way]
    one = start("kept", 1, then)
    assert not ended(one.keeper)
    assert one.process.stdin is not None
    if then == WAIT:
        one.process.send_signal(-status)
    else:
        one.process.stdin.write("\n")
        one.process.stdin.flush()
    assert one.process.wait(20) == status
    await eventually(lambda: ended(one.keeper))


@pytest.mark.slow
async def test_the_keeper_ends_when_its_process_is_killed_at_any_moment_of_the_start(
    eventually: Eventually,
) -> None:
    for n in range(20):
        session = _killed_while_starting(after_s=n * 0.0001)  # it takes a millisecond
        await eventually(lambda session=session: not _living(session))


def _killed_while_starting(after_s: float) -> int:
    """Return the session of a process that is killed while it starts its keeper; only these two processes are in it."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from workers import keeper; print(flush=True); keeper.start(); input()"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    time.sleep(after_s)  # the moment of the kill is what is tested
    process.kill()
    process.communicate()
    return process.pid


def _living(session: int) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if _session(p.pid) == session and not ended(p)]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


async def test_no_signal_except_sigkill_reaches_the_keeper(start: Start, eventually: Eventually) -> None:
    one = start("kept")
    assert one.keeper is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        one.keeper.send_signal(number)
    one.keeper.suspend()
    one.keeper.resume()
    assert one.process.poll() is None
    assert not ended(one.keeper)
    one.keeper.kill()
    await eventually(lambda: ended(one.keeper))
    assert one.process.poll() is None, "a process without its keeper continues"
    one.process.kill()
    assert one.connection.recv(1) == b""


def test_the_keeper_keeps_no_file_of_its_process_open(start: Start) -> None:
    one = start("kept")
    assert one.keeper is not None
    assert one.keeper.num_fds() == 1
    assert one.keeper.name() == keeper.NAME.decode()


def test_the_keeper_is_not_a_child_that_its_process_waits_for(start: Start) -> None:
    then = "try: os.wait()\nexcept ChildProcessError: connection.send(b'none')\nsignal.pause()"
    assert start("kept", 1, then).connection.recv(4) == b"none"


class LimitedLibc(ctypes.CDLL):
    """A libc that refuses `clone`, or lacks the named functions."""

    def __init__(self, *missing: str) -> None:
        super().__init__(None, use_errno=True)
        self._missing = missing

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(name)
        return super().__getattr__(name)

    def clone(self, *arguments: Any) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1


def test_without_a_keeper_the_signal_mask_is_unchanged_and_the_worker_starts() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(keeper.NoKeeper, match="clone: Operation not permitted"):
        keeper.start(LimitedLibc())
    with pytest.raises(keeper.NoKeeper, match="makecontext"):
        keeper.start(LimitedLibc("makecontext"))
    with structlog.testing.capture_logs() as entries:
        keeper.keep(LimitedLibc())
    assert [line["event"] for line in entries] == ["no_keeper"], "the worker starts anyway"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
