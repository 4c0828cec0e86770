"""What the journal must tell is read by a command in a process of its own: a post-mortem takes a core for a second, and the loop
here relays tokens."""

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
from typing import Any

from events.errors import HoldfastError

AT_ONCE = 2
WAITING_MAX = 6
WAIT_S = 20.0  # for its turn
WITHIN_S = 60.0
NICE = 10  # users' tokens go first
NAME_MAX = 200
ERROR_MAX = 600  # characters


class HistoryBusy(HoldfastError):
    """The console reads enough of the journal for others now: ask again in a moment."""


class HistorySilent(HoldfastError):
    """The journal cannot tell it."""


class RunningCommand:
    """One command: it runs in a thread, for a fork of a large process would keep the loop waiting, and is ended from the loop."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], within_s: float) -> None:
        self._command, self._environment, self._within_s = command, environment, within_s
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False
        self._lock = Lock()

    def run(self) -> tuple[int, bytes, bytes]:
        """Run it to its end; return its status, and what it has printed and complained. Raise TimeoutExpired."""
        process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the fleet's supervisor alone
        )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        with self._lock:
            self._process = process
            if self._over:
                process.kill()
        try:
            said, error = process.communicate(timeout=self._within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return process.returncode, said, error

    def end(self) -> None:
        """End it, if it has not ended; if it has not begun, it will not last."""
        with self._lock:
            self._over = True
            if self._process is not None:
                self._process.kill()


@dataclass(slots=True)
class HistoryReader:
    """Runs commands that read the journal, few at a time."""

    command: Sequence[str]  # `holdfast`, as this process can call it
    options: Sequence[str]  # of each command: which fleet
    environment: Mapping[str, str]  # that says where its journal and store are
    within_s: float = WITHIN_S  # for one command
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(AT_ONCE))
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    _waiting: int = 0

    async def report(self, *, incident: str = "", since: str = "") -> bytes:
        """Return the post-mortem of an incident, or of the time since, as a page, as of now. Raise HistoryBusy, HistorySilent."""
        part = f"--incident={_name(incident)}" if incident else f"--since={_name(since)}"
        with tempfile.TemporaryDirectory(prefix="holdfast-report-") as folder:
            page = Path(folder) / "report.html"
            await self._told("replay", "report", *self.options, part, "-o", str(page))
            return await asyncio.to_thread(page.read_bytes)

    async def story(self, request: str) -> dict[str, Any]:
        """Return what became of a request, as `holdfast request -o json` says it. Raise HistoryBusy or HistorySilent."""
        said = await self._told("request", *self.options, "-o", "json", "--", _name(request))
        story: dict[str, Any] = json.loads(said)
        return story

    async def _told(self, *words: str) -> str:
        """Run one command, and return what it prints."""
        async with self._turn():
            running = RunningCommand(
                [*self.command, *words], {**os.environ, **self.environment}, self.within_s
            )
            loop = asyncio.get_running_loop()
            try:
                status, said, error = await loop.run_in_executor(self._threads, running.run)
            except subprocess.TimeoutExpired:
                raise HistorySilent(
                    f"it took longer than {self.within_s:g} s; `holdfast {words[0]}` may take its time"
                ) from None
            finally:
                running.end()  # whoever has asked may have gone
        if status:
            why = error.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("holdfast: ")
            raise HistorySilent(why[:ERROR_MAX] or HistorySilent.__doc__)
        return said.decode(errors="replace")

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
    """Return what somebody has typed, if it can name anything. Raise HistorySilent."""
    text = text.strip()
    if not text or len(text) > NAME_MAX or not text.isprintable():
        raise HistorySilent(f"a name of 1 to {NAME_MAX} printable characters is wanted")
    return text
