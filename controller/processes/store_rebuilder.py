"""Rebuilds the state store from the journal when the projector reports missing rows or tables.

The projector may only write rows. If rows or tables are missing, it exits with a finding (exit code 3). Then `up`, which has
the database owner's URL, rebuilds the store and starts the projector again.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from controller.processes.children import Child, run_module
from controller.processes.console import print_line, warn
from events.errors import HoldfastError

WITHIN_S = 3600.0  # deadline of one rebuild, enough for many millions of events
OFTEN, OFTEN_S = 3, 600.0  # at most OFTEN rebuilds within OFTEN_S seconds
FINDING = 3


class StoreRebuilder:
    """Rebuilds the state store of one fleet whenever its projector exits because rows are missing."""

    def __init__(self, data: Path, rebuild: Callable[[Path], Awaitable[str]] | None = None) -> None:
        self._data = data
        self._rebuild = rebuild or _rebuild
        # start times of the last rebuilds, by the event loop's clock
        self._began: deque[float] = deque(maxlen=OFTEN)
        self._task: asyncio.Task[None] | None = None
        self._reported = ""

    def ended(self, child: Child, status: int) -> None:
        """Handle the end of a process with its exit status.

        If a projector ended because rows are missing, rebuild the store before the projector is restarted."""
        if child.role != "projector" or status != FINDING or self._task is not None:
            return
        child.restart = False
        self._report(child.last_words().removeprefix("holdfast: "))
        self._task = asyncio.create_task(self._rebuild_for(child), name="rebuild-store")

    def _report(self, words: str) -> None:
        if words != self._reported:
            warn(words)
        self._reported = words

    async def _rebuild_for(self, child: Child) -> None:
        try:
            await self._limit_rate()
            async with asyncio.timeout(WITHIN_S):
                print_line(f"the state store was rebuilt from the journal: {await self._rebuild(self._data)}")
            self._reported = ""
        except (HoldfastError, OSError, TimeoutError) as error:
            self._report(f"the state store cannot be rebuilt: {str(error) or 'timed out'}")
        finally:
            child.restart = True
            self._task = None

    async def _limit_rate(self) -> None:
        """Wait if the store was rebuilt three times within 600 s.

        The cause is then not repaired by a rebuild: the store is deleted repeatedly, or is wrongly reported as lost."""
        now = asyncio.get_running_loop().time()
        if len(self._began) == OFTEN and (wait_s := self._began[0] + OFTEN_S - now) > 0:
            warn(f"the state store was lost {OFTEN} times; the next rebuild starts in {wait_s:.0f} s")
            await asyncio.sleep(wait_s)
        self._began.append(asyncio.get_running_loop().time())

    async def stop(self) -> None:
        """Cancel a running rebuild. The old tables stay, and the rebuild is repeated after the next start of the fleet."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


async def _rebuild(data: Path) -> str:
    """Run `holdfast replay rebuild` and return the first line of its output. Raise HoldfastError if it fails."""
    output = await run_module("controller.cli", "replay", "rebuild", "--data", str(data))
    return output.splitlines()[0]
