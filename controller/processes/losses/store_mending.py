"""A projector that finds rows or tables missing ends with a finding. It may only write; so `up`, which has the owner's URL,
makes the store anew from the journal, and starts the projector again behind that.
"""

import asyncio
import os
import sys
from pathlib import Path

from controller.processes.children import Child, die_with
from controller.processes.console import say, warn
from events.errors import Finding

WITHIN_S = 3600.0  # of a journal of many millions of events
FINDING = 3


class StoreMending:
    """Makes one fleet's store anew, whenever its projector has found that it must be."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._task: asyncio.Task[None] | None = None
        self._said = ""

    def ended(self, child: Child, status: int) -> None:
        """Take the end of a process in; of a projector that has found a loss, nothing else is started meanwhile."""
        if child.role != "projector" or status != FINDING or self._task is not None:
            return
        child.restart = False
        self._say(child.last_words().removeprefix("holdfast: "))
        self._task = asyncio.create_task(self._mend(child), name="mend-store")

    def _say(self, words: str) -> None:
        if words != self._said:
            warn(words)
        self._said = words

    async def _mend(self, child: Child) -> None:
        try:
            async with asyncio.timeout(WITHIN_S):
                say(f"the state store was made anew from the journal: {await _rebuild(self._data)}")
            self._said = ""
        except (Finding, OSError, TimeoutError) as error:
            self._say(f"the state store cannot be made anew: {error or 'out of time'}")
        finally:
            child.restart = True
            self._task = None

    async def stop(self) -> None:
        """Let go of a rebuild that runs: the old tables stay, and the next start begins anew."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


async def _rebuild(data: Path) -> str:
    """Run `holdfast replay rebuild` and return what it says. Raise Finding with its reason."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controller.cli", "replay", "rebuild", "--data", str(data)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=die_with(os.getpid()),
    )
    try:
        said, words = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = words.decode(errors="replace").strip().splitlines() or [f"status {process.returncode}"]
        raise Finding(lines[-1].removeprefix("holdfast: "))
    return said.decode(errors="replace").strip().splitlines()[0]
