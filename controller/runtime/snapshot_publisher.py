"""Publishes snapshots of the fleet state to the journal while this controller leads.

A snapshot is the state as of the last decision, without later observations.

The journal drops old events to stay within its bounds (`events.journal.bounds`). A starting process that needs dropped events
folds its state from a snapshot instead.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from controller.deciders.fleet import Fleet
from controller.ports import Clock
from controller.read_model.snapshot import parts
from controller.runtime.initial_fold import snapshots
from events import codec
from events.errors import HoldfastError
from events.journal.bounds import SnapshotPosition, due
from events.journal.port import Journal
from events.journal.retention import JournalBounds
from events.journal.usage import JournalUsage
from events.observations import SnapshotKept
from events.order import Order

LOOK_S = 2.0
ASK_S = 60.0

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class SnapshotKeeper:
    """Checks every few seconds, while this controller leads, whether a snapshot is due, and publishes it."""

    journal: Journal
    order: Callable[[], Order[Fleet]]
    leading: Callable[[], bool]
    usage: Callable[[], Awaitable[JournalUsage]]
    bounds: JournalBounds
    clock: Clock
    look_s: float = LOOK_S

    def __post_init__(self) -> None:
        self._kept: SnapshotPosition | None = None  # position of the newest known snapshot
        self._looked = False  # whether the journal was searched for snapshots since this controller leads

    async def run(self) -> None:
        """Check every `look_s` until cancelled. If the broker does not answer, the next check tries again."""
        while True:
            try:
                async with asyncio.timeout(ASK_S):
                    await self.look()
            except (HoldfastError, TimeoutError) as error:
                log.debug("snapshot_waits", why=str(error))
            await self.clock.sleep(self.look_s)

    async def look(self) -> bool:
        """Publish a snapshot if one is due. Return whether one was published.

        Raise JournalUnavailable if the journal does not answer.
        """
        if not self.leading():
            self._looked = False
            return False
        usage = await self.usage()
        bounds = JournalBounds(
            min(filter(None, (self.bounds.bytes, usage.bytes_max)), default=None),
            min(filter(None, (self.bounds.age, usage.age_max)), default=None),
        )
        if not bounds:
            return False
        if not self._looked:
            self._kept, self._looked = await newest_kept(self.journal), True
        order = self.order()
        if not order.position.number or not due(bounds, usage, self._kept):
            return False
        since = order.pending[0].at if order.pending else usage.at
        facts = await asyncio.to_thread(
            parts, order.settled, order.position, dict(order.sources), id=codec.new_id(), since=since
        )
        for fact in facts:
            self.journal.observe(fact)
        self._kept = SnapshotPosition(facts[0].through, since)
        size = sum(len(fact.data) for fact in facts)
        log.info("snapshot_kept", through=facts[0].through, parts=len(facts), bytes=size)
        if bounds.bytes is not None and size > bounds.bytes / 32:
            log.warning("journal_bound_small", snapshot_bytes=size, max_bytes=bounds.bytes)
        return True


async def newest_kept(journal: Journal) -> SnapshotPosition | None:
    """Return the position of the newest complete snapshot on the journal; None without one.

    Raise JournalUnavailable if the journal does not answer.
    """
    found = None
    async for event, snapshot in snapshots(journal):
        assert isinstance(event.fact, SnapshotKept)
        found = SnapshotPosition(snapshot.position.through, event.fact.since)
    return found
