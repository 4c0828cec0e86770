"""A journal and a store that call a function at each step of their projector, to interrupt it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from controller.deciders.fleet import Fleet
from controller.ports import ReadPosition, Snapshot
from events.fact import Recorded

STEPS = ("begin", "loaded", "read", "folded", "writing", "written")
Step = Callable[[str], Awaitable[None]]


class JournalSteps:
    """A journal that calls `step` before and after the projector folds each batch."""

    def __init__(self, journal: Any, step: Step) -> None:
        self._journal, self._step = journal, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)

    async def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
        async for batch in self._journal.read(after, until=until):
            await self._step("read")
            yield batch
            await self._step("folded")


class StoreSteps:
    """A state store that calls `step` around the projector's reads and writes."""

    def __init__(self, store: Any, step: Step) -> None:
        self._store, self._step = store, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def position(self) -> ReadPosition:
        await self._step("begin")
        found: ReadPosition = await self._store.position()
        return found

    async def load(self) -> Snapshot | None:
        found: Snapshot | None = await self._store.load()
        await self._step("loaded")
        return found

    async def project(self, events: Sequence[Recorded], shown: Fleet, settled: Snapshot, after: int) -> None:
        await self._step("writing")
        await self._store.project(events, shown, settled, after)
        await self._step("written")
