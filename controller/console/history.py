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


@dataclass(slots=True)
class HistoryReader:
    """Runs commands that read the journal, few at a time."""

    command: Sequence[str]  # `holdfast`, as this process can call it
    options: Sequence[str]  # of each command: which fleet
    environment: Mapping[str, str]  # that says where its journal and store are
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
        loop = asyncio.get_running_loop()
        async with self._turn():
            process = await loop.run_in_executor(self._threads, self._begin, words)
            try:
                said, error = await loop.run_in_executor(self._threads, _ended, process)
            except subprocess.TimeoutExpired:
                raise HistorySilent(
                    f"it took longer than {WITHIN_S:g} s; `holdfast {words[0]}` may take its time"
                ) from None
            finally:
                process.kill()  # whoever has asked may have gone
        if process.returncode:
            why = error.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("holdfast: ")
            raise HistorySilent(why[:ERROR_MAX] or HistorySilent.__doc__)
        return said.decode(errors="replace")

    def _begin(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start it, in a thread: a fork of a large process would keep the loop waiting."""
        process = subprocess.Popen(
            [*self.command, *words],
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the fleet's supervisor alone
        )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        return process

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


def _ended(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Wait for its end. Raise TimeoutExpired, and it has ended."""
    try:
        return process.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise


def _name(text: str) -> str:
    """Return what somebody has typed, if it can name anything. Raise HistorySilent."""
    text = text.strip()
    if not text or len(text) > NAME_MAX or not text.isprintable():
        raise HistorySilent(f"a name of 1 to {NAME_MAX} printable characters is wanted")
    return text
