"""Reads the journal for the console with a command in a separate process.

A post-mortem uses a core for a second, which would block this process's event loop, which relays tokens."""

import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from events.errors import HoldfastError

AT_ONCE = 2
WAITING_MAX = 6
WAIT_S = 20.0  # longest wait in the queue
WITHIN_S = 60.0
NICE = 10  # relaying users' tokens has priority
NAME_MAX = 200
ERROR_MAX = 600  # characters


class HistoryBusy(HoldfastError):
    """The console is already reading the journal for other viewers. Try again in a moment."""


class HistoryUnavailable(HoldfastError):
    """The journal does not have this information."""


class RunningCommand:
    """One command. A thread starts it, because forking a large process would block the event loop. The loop can end it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], within_s: float) -> None:
        self._command, self._environment, self._within_s = command, environment, within_s
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False
        self._lock = Lock()

    def run(self) -> tuple[int, bytes, bytes]:
        """Run the command to its end. Return its status, stdout and stderr. Raise TimeoutExpired."""
        process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal must reach only the fleet's supervisor
        )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        with self._lock:
            self._process = process
            if self._over:
                process.kill()
        try:
            output, error = process.communicate(timeout=self._within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return process.returncode, output, error

    def end(self) -> None:
        """Kill the command if it is running; if it has not started, it is killed at its start."""
        with self._lock:
            self._over = True
            if self._process is not None:
                self._process.kill()


@dataclass(slots=True)
class HistoryReader:
    """Runs commands that read the journal, at most `AT_ONCE` at a time."""

    command: Sequence[str]  # how to run `holdfast` from this process
    options: Sequence[str]  # flags of every command that select the fleet
    environment: Mapping[str, str]  # variables with the addresses of journal and store
    within_s: float = WITHIN_S  # deadline of one command
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(AT_ONCE))
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    _waiting: int = 0

    async def report(self, *, incident: str = "", since: str = "") -> bytes:
        """Return the HTML post-mortem of an incident, or of the time since, as of now. Raise HistoryBusy, HistoryUnavailable."""
        part = f"--incident={_name(incident)}" if incident else f"--since={_name(since)}"
        with tempfile.TemporaryDirectory(prefix="holdfast-report-") as folder:
            page = Path(folder) / "report.html"
            await self._run("replay", "report", *self.options, part, "-o", str(page))
            return await asyncio.to_thread(page.read_bytes)

    async def story(self, request: str) -> dict[str, object]:
        """Return the history of a request, as `holdfast request -o json` prints it. Raise HistoryBusy or HistoryUnavailable."""
        output = await self._run("request", *self.options, "-o", "json", "--", _name(request))
        story: dict[str, object] = json.loads(output)
        return story

    async def _run(self, *words: str) -> str:
        """Run one command. Return its output."""
        async with self._turn():
            running = RunningCommand(
                [*self.command, *words], {**os.environ, **self.environment}, self.within_s
            )
            loop = asyncio.get_running_loop()
            try:
                status, output, error = await loop.run_in_executor(self._threads, running.run)
            except subprocess.TimeoutExpired:
                raise HistoryUnavailable(
                    f"it took longer than {self.within_s:g} s; run `holdfast {words[0]}`, which has no time limit"
                ) from None
            finally:
                running.end()  # the client may have disconnected
        if status:
            why = error.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("holdfast: ")
            raise HistoryUnavailable(why[:ERROR_MAX] or HistoryUnavailable.__doc__)
        return output.decode(errors="replace")

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._waiting >= WAITING_MAX:
            raise HistoryBusy(HistoryBusy.__doc__)
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turns.acquire()
        except TimeoutError:
            raise HistoryBusy(HistoryBusy.__doc__) from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turns.release()


def _name(text: str) -> str:
    """Return a name from a request's parameters. Raise HistoryUnavailable if it cannot be one."""
    text = text.strip()
    if not text or len(text) > NAME_MAX or not text.isprintable():
        raise HistoryUnavailable(f"expected a name of 1 to {NAME_MAX} printable characters")
    return text
