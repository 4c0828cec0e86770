"""Reads the journal for the console by running `holdfast` commands in separate processes.

A post-mortem takes about a second of CPU time. In the frontend's own process, a post-mortem would block the event loop that
relays tokens."""

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

AT_ONCE = 2  # maximum number of commands that run at the same time
WAITING_MAX = 6  # maximum number of commands that wait to run
WAIT_S = 20.0  # maximum seconds that a command waits to run
WITHIN_S = 60.0  # timeout in seconds of one command
NICE = 10  # nice value of the commands, because relaying users' tokens has priority
NAME_MAX = 200  # maximum characters of a name in a request's parameters
ERROR_MAX = 600  # maximum characters of an error message


class HistoryBusy(HoldfastError):
    """The console is already reading the journal for other viewers. Try again in a moment."""


class HistoryUnavailable(HoldfastError):
    """The journal does not have this information."""


class RunningCommand:
    """One command in a separate process.

    `run` is called in a thread of its own, because forking a large process would block the event loop. `end` is called in the
    thread of the event loop."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], within_s: float) -> None:
        self._command, self._environment, self._within_s = command, environment, within_s
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False
        self._lock = Lock()

    def run(self) -> tuple[int, bytes, bytes]:
        """Run the command to its end, and return its exit status, stdout and stderr.

        If the command takes longer than `within_s`, kill it and raise TimeoutExpired."""
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
        """Kill the command. If the command has not started yet, `run` kills the process as soon as it starts."""
        with self._lock:
            self._over = True
            if self._process is not None:
                self._process.kill()


@dataclass(slots=True)
class HistoryReader:
    """Runs `holdfast` commands that read the journal, at most `AT_ONCE` at the same time."""

    command: Sequence[str]  # program and arguments that run `holdfast`
    options: Sequence[str]  # flags that select the fleet, which every command gets
    environment: Mapping[str, str]  # environment variables with the addresses of the journal and the store
    within_s: float = WITHIN_S  # timeout of one command in seconds
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(AT_ONCE))
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    _waiting: int = 0

    async def report(self, *, incident: str = "", since: str = "") -> bytes:
        """Return a post-mortem as an HTML page: of an incident, or of the time from `since` until now.

        Raise HistoryBusy if too many commands are waiting, or HistoryUnavailable if the command fails."""
        part = f"--incident={_name(incident)}" if incident else f"--since={_name(since)}"
        with tempfile.TemporaryDirectory(prefix="holdfast-report-") as folder:
            page = Path(folder) / "report.html"
            await self._run("replay", "report", *self.options, part, "-o", str(page))
            return await asyncio.to_thread(page.read_bytes)

    async def story(self, request: str) -> dict[str, object]:
        """Return the JSON object that `holdfast request -o json` prints about a request.

        Raise HistoryBusy or HistoryUnavailable as `report` does."""
        output = await self._run("request", *self.options, "-o", "json", "--", _name(request))
        story: dict[str, object] = json.loads(output)
        return story

    async def _run(self, *words: str) -> str:
        """Run one `holdfast` command with these arguments, and return the command's stdout.

        Raise HistoryBusy if too many commands are waiting, or HistoryUnavailable if the command fails."""
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
                running.end()  # kills the command if this task was cancelled because the client has disconnected
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
    """Return a name from a request's parameters without surrounding spaces.

    Raise HistoryUnavailable if the name is empty, too long or not printable."""
    text = text.strip()
    if not text or len(text) > NAME_MAX or not text.isprintable():
        raise HistoryUnavailable(f"expected a name of 1 to {NAME_MAX} printable characters")
    return text
