"""A projector that finds rows or tables missing ends with a finding. It may only write; so `up`, which has the owner's URL,
makes the store anew from the journal, and starts the projector again behind that.
"""

import asyncio
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from controller.processes.children import Child, die_with
from controller.processes.console import say, warn
from events.errors import Finding

WITHIN_S = 3600.0  # of a journal of many millions of events
OFTEN, OFTEN_S = 3, 600.0  # rebuilds within so many seconds: more would do nothing but work
FINDING = 3


class StoreMending:
    """Makes one fleet's store anew, whenever its projector has found that it must be."""

    def __init__(self, data: Path, rebuild: Callable[[Path], Awaitable[str]] | None = None) -> None:
        self._data = data
        self._rebuild = rebuild or _rebuild
        self._began: deque[float] = deque(maxlen=OFTEN)  # by the loop's clock
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
            await self._not_too_often()
            async with asyncio.timeout(WITHIN_S):
                say(f"the state store was made anew from the journal: {await self._rebuild(self._data)}")
            self._said = ""
        except (Finding, OSError, TimeoutError) as error:
            self._say(f"the state store cannot be made anew: {error or 'out of time'}")
        finally:
            child.restart = True
            self._task = None

    async def _not_too_often(self) -> None:
        """Wait, where it was made anew again and again: something takes it away, or takes it for lost."""
        now = asyncio.get_running_loop().time()
        if len(self._began) == OFTEN and (wait_s := self._began[0] + OFTEN_S - now) > 0:
            warn(f"the state store was lost {OFTEN} times; it is made anew in {wait_s:.0f} s")
            await asyncio.sleep(wait_s)
        self._began.append(asyncio.get_running_loop().time())

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
