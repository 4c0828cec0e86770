"""The projector: the journal, folded into the state store, each event once.

    journal ── read ──▶ fold ──▶ gathered ──▶ project (one transaction) ──▶ gathered meanwhile …

Reading and folding go on while the last batch is written: what has gathered by then is the next batch, so
batches grow with the load and a lone event waits for nobody. Nothing is remembered outside the store:
whatever goes wrong, the projector reads its position there and begins anew from it. That is what makes a kill at
any step harmless.

What cannot be mended by trying again is raised: a database that is ahead of the stream, or has lost rows, a stream that was
made anew, an event of an unknown kind. Whether rows are lost is looked at before each beginning, and every half minute.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from controller.deciders.fleet import Fleet
from controller.ports import (
    AnotherProjector,
    ReadPosition,
    Snapshot,
    StateStore,
    StoreForbidden,
    StoreLost,
    StoreRefused,
    StoreUnavailable,
)
from controller.runtime.beginning import oldest, order_from, snapshots
from controller.runtime.history import history
from controller.runtime.lineage import refuse_foreign_stream
from controller.runtime.projection.losses import refuse_lost_rows
from events.fact import Recorded
from events.journal.port import Journal, JournalUnavailable
from events.order import Order

GATHER_MAX = 8_192  # events folded and not yet written; the reader waits beyond it
GATHER_HISTORY = 4_096  # events that make a batch where nobody waits for the single one
CHECK_S = 10.0  # how long the comparison of store and stream may take
LOOK_EVERY_S = 30.0  # at what the store holds
WRITE_S = 120.0
WAIT_MIN_S = 0.05  # after a failure; doubles
WAIT_MAX_S = 2.0
YIELD_S = 1.0  # how long to leave the field to another projector

Step = Callable[[str], Awaitable[None]]
log = structlog.get_logger()


async def _no_step(name: str) -> None:
    """Do nothing between two steps. Tests put an end to the projector here."""


@dataclass
class Gathered:
    """What has been folded and is to be written next."""

    events: list[Recorded] = field(default_factory=list)
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    taken: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Progress:
    """How far the projector is, for metrics and readiness."""

    projected: int = 0  # the sequence of the last event in the rows
    batches: int = 0
    events: int = 0
    restarts: int = 0
    connected: bool = False  # to store and journal, when last heard of


class Projector:
    """Follows a journal and keeps a store's rows at it."""

    def __init__(
        self,
        journal: Journal,
        store: StateStore,
        *,
        step: Step = _no_step,
        written: Callable[[int, int], None] = lambda seq, events: None,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._journal, self._store = journal, store
        self._look_every_s = look_every_s
        self._step, self._written = step, written
        self.progress = Progress()

    async def run(self) -> None:
        """Project for ever. Raise StoreAhead, StoreLost, JournalChanged, UnknownKind or OutOfOrder: see a person."""
        wait_s = WAIT_MIN_S
        while True:
            before = self.progress.batches
            try:
                await self._follow(None)
            except StoreForbidden:
                raise
            except StoreRefused as error:  # they were there when this process began
                raise StoreLost(
                    f"tables are missing: {error.__cause__ or error}. {StoreLost.__doc__}"
                ) from error
            except AnotherProjector as error:
                log.info("another_projector", reason=str(error))
                await asyncio.sleep(random.uniform(YIELD_S, 2 * YIELD_S))
            except (StoreUnavailable, JournalUnavailable, TimeoutError) as error:
                log.warning("projector_waits", reason=str(error) or "out of time", wait_s=wait_s)
                wait_s = WAIT_MIN_S if self.progress.batches > before else min(wait_s * 2, WAIT_MAX_S)
                await asyncio.sleep(random.uniform(wait_s / 2, wait_s))
            self.progress.connected = False
            self.progress.restarts += 1

    async def catch_up(self, until: int) -> None:
        """Project everything up to stream sequence `until`, and return. Raise whatever goes wrong."""
        await self._follow(until)

    async def _follow(self, until: int | None) -> None:
        position = await self._begin()
        if until is not None and position.seq >= until:
            return
        order = await self._from_snapshot(position)
        gathered = Gathered()
        works = [
            self._read(order, position, gathered, until),
            self._write(order, gathered, position.seq, until),
        ]
        await _together(*works, *([self._look()] if until is None else []))

    async def _begin(self) -> ReadPosition:
        """Read the store's position and make sure that it lies on this stream."""
        await self._step("begin")
        async with asyncio.timeout(CHECK_S):
            position = await self._store.position()
            await refuse_foreign_stream(self._journal, position)
            await refuse_lost_rows(self._journal, self._store)
        self.progress.projected = position.seq
        self.progress.connected = True
        return position

    async def _look(self) -> None:
        """Look again and again whether the store holds what was projected."""
        while True:
            await asyncio.sleep(self._look_every_s)
            async with asyncio.timeout(CHECK_S):
                await refuse_lost_rows(self._journal, self._store)

    async def _from_snapshot(self, position: ReadPosition) -> Order[Fleet]:
        """Return the fold to go on with: the store's, or one from the journal where that has dropped what comes next. Raise
        StoreLost if it has dropped what the store has not projected."""
        snapshot = await self._store.load()
        await self._step("loaded")
        order = order_from(snapshot if snapshot is not None and _reach(snapshot) <= position.seq else None)
        first = await self._journal.first_seq()
        if first <= order.last_seq + 1:
            return order
        if not position.seq:
            return order_from(await oldest(self._journal, 0))
        kept = [s async for _, s in snapshots(self._journal) if _reach(s) <= position.seq]
        if not kept:
            raise StoreLost(
                f"the journal begins at {first}, and the store was projected to {position.seq}. {StoreLost.__doc__}"
            )
        return order_from(kept[-1])

    async def _read(
        self, order: Order[Fleet], position: ReadPosition, gathered: Gathered, until: int | None
    ) -> None:
        journal, after = self._journal, order.position.through
        enough = 1 if until is None else GATHER_HISTORY
        async for batch in journal.read(after) if until is None else history(journal, after, until):
            await self._step("read")
            while len(gathered.events) >= GATHER_MAX:
                gathered.taken.clear()
                await gathered.taken.wait()
            for event in batch:
                order.take(event)
            gathered.events.extend(e for e in batch if e.seq > position.seq)
            await self._step("folded")
            if len(gathered.events) >= enough:
                gathered.grown.set()
        gathered.grown.set()

    async def _write(self, order: Order[Fleet], gathered: Gathered, after: int, until: int | None) -> None:
        while True:
            await gathered.grown.wait()
            gathered.grown.clear()
            if not gathered.events:
                return  # the reader has come to its end
            events, gathered.events = gathered.events, []
            gathered.taken.set()
            shown, settled = order.shown, Snapshot(order.settled, order.position, dict(order.sources))
            await self._step("writing")
            async with asyncio.timeout(WRITE_S):
                await self._store.project(events, shown, settled, after)
            after = events[-1].seq
            await self._step("written")
            self._account(events)
            if until is not None and events[-1].seq >= until:
                return

    def _account(self, events: list[Recorded]) -> None:
        progress = self.progress
        progress.projected = events[-1].seq
        progress.batches += 1
        progress.events += len(events)
        self._written(progress.projected, len(events))


def _reach(snapshot: Snapshot) -> int:
    return max(snapshot.position.decided, snapshot.position.through)


async def _together(*works: Coroutine[Any, Any, None]) -> None:
    """Run all to their end. The first failure ends the others and is raised; a refusal before what may be tried again.

    Not a TaskGroup: in Python 3.11 a group that is cancelled in the very moment in which one of its tasks fails raises
    only the failure, so that a caller who tries again never ends; and one that fails while it waits leaves its caller
    marked as cancelled, so that the caller cannot tell the two apart.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [e for e in ends if isinstance(e, BaseException) and not isinstance(e, asyncio.CancelledError)]
    retried = (StoreUnavailable, JournalUnavailable, TimeoutError)
    if failures:
        raise next((e for e in failures if not isinstance(e, retried)), failures[0])
