"""Child processes that never outlive their parent, and that can be restarted when they die.

A child requests SIGKILL from the kernel at its parent's death (PDEATHSIG, Linux), so a killed supervisor leaves no orphans.
Each child runs in its own session. So Ctrl-C in a terminal reaches only the supervisor, which stops the children in order.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from controller.adapters.embedded.server import die_with
from events.errors import HoldfastError

RESTART_WAIT_MIN_S = 0.2
RESTART_WAIT_MAX_S = 10.0
POLL_S = 0.01  # interval of polling children that are stopping
SETTLED_AFTER_S = 3.0  # a process that ran longer did not fail to start, so its end resets the back-off


def shell_status(status: int) -> int:
    """Return an exit status as a shell reports it.

    `status` is an exit status of `subprocess`, where -n means that signal n ended the process. A shell reports it as 128 + n, for
    example 137 for SIGKILL (9).
    """
    return status if status >= 0 else 128 - status


def reap_orphan(seen: int) -> int:
    """Reap the dead child `seen`, the result of the previous call. Return the pid of another dead child, or 0.

    The first process of a container becomes the parent of all orphans, such as the keeper (second process) of a killed worker.
    Only this function reaps orphans. A call returns the pid of a dead child that it finds, and the next call reaps this child
    if it still exists. If this process started the child, the code that started it can reap it between the two calls.
    """
    try:
        dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if dead is not None and dead.si_pid == seen:
            os.waitpid(seen, os.WNOHANG)
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return dead.si_pid if dead is not None else 0


@dataclass
class Child:
    """One managed child: the command to run, and the process that runs it now."""

    name: str
    role: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    # number of workers in a worker process, which has the name of its first worker; 0: they come and go (a file of upstreams)
    workers: int = 1
    restart: bool = True
    process: subprocess.Popen[bytes] | None = None
    lives: int = 0
    _started: float = 0.0
    _wait_s: float = RESTART_WAIT_MIN_S
    _due: float = 0.0

    def start(self, also: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start the process, with its output appended to its log file. `also` has additional environment variables.

        Raise OSError if the process cannot be started or its log cannot be opened.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment, **also},
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        self.lives += 1
        self._started = time.monotonic()

    @property
    def pid(self) -> int | None:
        """The pid of the running process, or None if it is not running."""
        return self.process.pid if self.process and self.process.returncode is None else None

    def ended(self) -> int | None:
        """Return the exit status if the process has ended since the last call, else None."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        self.process = None
        if time.monotonic() - self._started > SETTLED_AFTER_S:
            self._wait_s = RESTART_WAIT_MIN_S
        self.rest()
        return status

    def rest(self) -> None:
        """Delay the next start by the back-off, and double the back-off up to 10 s."""
        self._due = time.monotonic() + self._wait_s
        self._wait_s = min(self._wait_s * 2, RESTART_WAIT_MAX_S)

    def due(self) -> bool:
        """Return whether the process must be started now.

        This is the case if it is not running, may be restarted, and its back-off is over."""
        return self.restart and self.process is None and time.monotonic() >= self._due

    def signal(self, number: int) -> None:
        """Send a signal to the process if it is running."""
        if self.pid is not None and self.process is not None:
            self.process.send_signal(number)

    def last_words(self) -> str:
        """Return the last non-empty line of the child's log, for an error message.

        An exception group's traceback has frame characters at the start of its lines, which are removed. The result is empty if
        there is no log.
        """
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return ""
        lines = (line.strip(" |+-") for line in reversed(text.splitlines()))
        return next(filter(None, lines), "")


async def stop_all(children: Sequence[Child], within_s: float, ended: Callable[[Child, int], None]) -> None:
    """Stop processes by SIGTERM, and kill those that do not end within `within_s` seconds.

    Call `ended` with each child that has ended, and its exit status.
    """

    def poll() -> None:
        for child in children:
            if (status := child.ended()) is not None:
                ended(child, status)

    for child in children:
        child.signal(signal.SIGTERM)
        child.signal(signal.SIGCONT)  # resumes a suspended worker, so that it handles the SIGTERM
    deadline = time.monotonic() + within_s
    while any(child.process is not None for child in children) and time.monotonic() < deadline:
        poll()
        await asyncio.sleep(POLL_S)
    for child in children:
        child.signal(signal.SIGKILL)
        if child.process is not None:
            child.process.wait()
    poll()


async def run_module(*words: str, environment: Mapping[str, str] | None = None) -> str:
    """Run `python -m` with the arguments `words` as a child process, and return the output on its stdout.

    The child is killed if this process ends first. Raise HoldfastError with the last line of the child's stderr if the child's
    exit status is not 0.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        preexec_fn=die_with(os.getpid()),
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:  # this call was cancelled
            process.kill()
            await process.wait()
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or [f"status {process.returncode}"]
        raise HoldfastError(lines[-1].removeprefix("holdfast: "))
    return output.decode(errors="replace").strip()


LOG_BYTES_MAX = 32 * 1024 * 1024


def trim(log: Path, most: int = LOG_BYTES_MAX) -> None:
    """If a process's log is larger than `most` bytes, copy it to NAME.1 and truncate it.

    The logging process continues to append. Lines that it writes between the copy and the truncation are lost.
    """
    try:
        if log.stat().st_size <= most:
            return
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)
    except OSError:  # the log does not exist yet, or the disk is full; the next call tries again
        return
