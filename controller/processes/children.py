"""Child processes that never outlive their parent, and come back when they die.

A child asks the kernel for SIGKILL at its parent's death (PDEATHSIG, Linux), so that a killed supervisor leaves no
orphan. It runs in a session of its own: a terminal's Ctrl-C reaches the supervisor alone, which stops the children
in order.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

RESTART_WAIT_MIN_S = 0.2
RESTART_WAIT_MAX_S = 10.0
POLL_S = 0.01  # while children end
SETTLED_AFTER_S = 3.0  # a life longer than this was no failure to start: the back-off begins anew
_PR_SET_PDEATHSIG = 1


def shell_status(status: int) -> int:
    """Return an exit status as a shell says it: 128 + n for a process that signal n ended, 137 for SIGKILL."""
    return status if status >= 0 else 128 - status


def die_with(parent: int) -> Callable[[], None]:
    """Return a preexec function: SIGKILL for the child when `parent` dies, even if it died before we asked."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def preexec() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return preexec


def bury(seen: int) -> int:
    """Reap a child that was dead already at the last look (`seen`, its pid): nobody waits for it. Return one that is dead now.

    The first process of a container inherits all orphans, the keepers of killed workers among them. Those that
    somebody here waits for are gone at the next look.
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
    """One place in the fleet: the command that fills it, and the process that fills it now."""

    name: str
    role: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: int = 1  # that live in it, if it is a worker process: its name is the first one's
    restart: bool = True
    process: subprocess.Popen[bytes] | None = None
    lives: int = 0
    _started: float = 0.0
    _wait_s: float = RESTART_WAIT_MIN_S
    _due: float = 0.0

    def start(self, also: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start the process, its output appended to its log file. `also` is told it besides its environment.

        Raise OSError if there is no process, no memory, or no room for its log.
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
        """The pid of the living process."""
        return self.process.pid if self.process and self.process.returncode is None else None

    def ended(self) -> int | None:
        """Return the exit status if the process has ended since it was last asked, else None."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        self.process = None
        if time.monotonic() - self._started > SETTLED_AFTER_S:
            self._wait_s = RESTART_WAIT_MIN_S
        self.rest()
        return status

    def rest(self) -> None:
        """Start it no sooner than after the back-off, which doubles."""
        self._due = time.monotonic() + self._wait_s
        self._wait_s = min(self._wait_s * 2, RESTART_WAIT_MAX_S)

    def due(self) -> bool:
        """Return whether it is time to start the process again."""
        return self.restart and self.process is None and time.monotonic() >= self._due

    def signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self.pid is not None and self.process is not None:
            self.process.send_signal(number)

    def last_words(self) -> str:
        """Return the last line of the child's log that says something, without a traceback's frame: for an error message."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return ""
        said = (line.strip(" |+-") for line in reversed(text.splitlines()))
        return next(filter(None, said), "")


async def end(children: Sequence[Child], within_s: float, ended: Callable[[Child, int], None]) -> None:
    """End processes, those that do not within `within_s` by SIGKILL. `ended` is called with each one's exit status."""

    def look() -> None:
        for child in children:
            if (status := child.ended()) is not None:
                ended(child, status)

    for child in children:
        child.signal(signal.SIGTERM)
        child.signal(signal.SIGCONT)  # a hung (stopped) worker must hear it
    deadline = time.monotonic() + within_s
    while any(child.process is not None for child in children) and time.monotonic() < deadline:
        look()
        await asyncio.sleep(POLL_S)
    for child in children:
        child.signal(signal.SIGKILL)
        if child.process is not None:
            child.process.wait()
    look()
