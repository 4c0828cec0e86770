"""The fleet state folded from the journal, and how a starting process finds its initial state.

The fold starts from the state store's snapshot and continues with the journal's later events. If the journal has dropped the
first of these events, the fold starts from a snapshot on the journal itself. While the broker is unavailable, the fold uses the
events in the state store.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import structlog

from controller.deciders.fleet import Fleet, evolve
from controller.ports import ReadPosition, Snapshot, StateStore, StoreAhead, StoreRefused, StoreUnavailable
from controller.read_model import snapshot as fleet_codec
from controller.runtime.bounded_read import history
from events.fact import Recorded
from events.journal.port import Journal, JournalChanged, JournalDropped, JournalUnavailable
from events.observations import SnapshotKept
from events.order import Order

LOAD_DEADLINE_S = 3.0
ASK_DEADLINE_S = 2.0
FIND_DEADLINE_S = 60.0  # for finding a snapshot on the journal: ten thousand workers need many parts
ASK_AGAIN_S = 0.1

log = structlog.get_logger(__name__)


class FleetFold:
    """Holds the fleet state folded from events. A subclass reads the events and passes them to `take`."""

    def __init__(self, order: Order[Fleet]) -> None:
        self.order = order

    @property
    def fleet(self) -> Fleet:
        """The fleet's state after the last event read."""
        return self.order.shown

    @property
    def seq(self) -> int:
        """The sequence of the last event read."""
        return self.order.last_seq

    @property
    def number(self) -> int:
        """The number of the last decision folded. Frontends record this number as `routed_under`."""
        return self.order.position.number

    @property
    def whole(self) -> bool:
        """Whether the state is consistent: all events up to the initial snapshot's last decision have been folded.

        That decision did not take into account the observations after its `through`. The snapshot lacks them, so they are read
        from the journal.
        """
        return self.order.last_seq >= self.order.position.decided

    def take(self, batch: Sequence[Recorded]) -> None:
        """Fold these events. Raise OutOfOrder if a sequence is missing or repeated."""
        take = self.order.take
        for event in batch:
            take(event)


class StoredHistory(StateStore, Protocol):
    """A state store with events that can be read in order."""

    def select(self, *, after: int = 0) -> AsyncIterator[Sequence[Recorded]]:
        """Yield lists of the stored events above sequence `after`, in order.

        Raise StoreUnavailable if the store does not answer.
        """


def order_from(snapshot: Snapshot | None) -> Order[Fleet]:
    """Return an `Order` that folds the fleet state from this snapshot on; an empty one if `snapshot` is None."""
    if snapshot is None:
        return Order(evolve, Fleet())
    return Order(evolve, snapshot.fleet, snapshot.position, dict(snapshot.sources))


async def begin(store: StateStore | None) -> tuple[Order[Fleet], ReadPosition]:
    """Return an `Order` with the initial fleet state, and the state store's position.

    The state is the store's snapshot. It is empty without a store, without a snapshot, or if the store does not answer.
    """
    snapshot: Snapshot | None = None
    position = ReadPosition()
    if store is not None:
        try:
            async with asyncio.timeout(LOAD_DEADLINE_S):
                snapshot = await store.load()
                position = await store.position()  # read even without a snapshot, to check the stream later
        except (StoreUnavailable, StoreRefused, TimeoutError) as error:
            log.warning("store_unreachable_reading_all", why=str(error))
            snapshot = None
    return order_from(snapshot), position


async def by_the_store(store: StoredHistory, snapshot: Order[Fleet]) -> Order[Fleet]:
    """Return the fleet state folded from the store alone: from `snapshot` and the later events in the table `fleet_events`.

    For a process that cannot read the journal. `fleet_events` lacks messages that do not change the fleet state (messages that
    are not events, and snapshots), so its sequences have gaps. Once the journal can be read, the process folds the journal from
    the same snapshot instead. Raise StoreUnavailable, StoreRefused or OutOfOrder if the events cannot be read or folded.
    """
    order = Order(evolve, snapshot.settled, snapshot.position, dict(snapshot.sources))
    async for batch in store.select(after=order.last_seq):
        for event in batch:
            order.last_seq = event.seq - 1  # skip sequences that are not stored, because they change no fold
            order.take(event)
        await asyncio.sleep(0)
    return order


async def join(journal: Journal, position: ReadPosition, order: Order[Fleet]) -> Order[Fleet]:
    """Return a fleet state into which the next journal events can be folded: `order`, or a newer snapshot.

    The newest snapshot on the journal is used if the journal has dropped the event after `order`.

    Wait until the journal answers. Raise StoreAhead or JournalChanged if the store, which is at `position`, belongs to another
    journal. Raise JournalDropped if a snapshot on the journal is needed, but none is there.
    """
    while True:
        try:
            async with asyncio.timeout(ASK_DEADLINE_S):
                await refuse_foreign_stream(journal, position)
                first = await journal.first_seq()
            if first <= order.last_seq + 1:
                return order
            async with asyncio.timeout(FIND_DEADLINE_S):
                return order_from(await newest(journal, order.last_seq))
        except (JournalUnavailable, TimeoutError):
            await asyncio.sleep(ASK_AGAIN_S)


async def newest(journal: Journal, after: int) -> Snapshot:
    """Return the newest complete snapshot on the journal.

    Raise JournalDropped if the journal has no complete snapshot. The error reports that the events after `after` are lost.
    """
    found: Snapshot | None = None
    async for _, snapshot in snapshots(journal):
        found = snapshot
    return found or await _raise_dropped(journal, after)


async def oldest(journal: Journal, after: int) -> Snapshot:
    """Return the oldest complete snapshot on the journal after which no event has been dropped.

    Raise JournalDropped if there is no such snapshot. The error reports that the events after `after` are lost.
    """
    async for _, snapshot in snapshots(journal):
        return snapshot
    return await _raise_dropped(journal, after)


async def _raise_dropped(journal: Journal, after: int) -> Snapshot:
    first = await journal.first_seq()
    raise JournalDropped(
        f"the journal begins at {first}: what follows {after} is lost, and the journal holds no snapshot to start from. "
        "Bounds were set by hand, or no controller has run for long (docs/reference/state-store.md)"
    )


async def snapshots(journal: Journal) -> AsyncIterator[tuple[Recorded, Snapshot]]:
    """Yield the complete snapshots on the journal, oldest first, each with the event that holds its last part.

    Skip the snapshots for which the journal has dropped later events.
    """
    first, together = await journal.first_seq(), fleet_codec.Parts()
    async for event in journal.of_kind(SnapshotKept):
        assert isinstance(event.fact, SnapshotKept)
        try:
            whole = together.take(event.fact)
        except fleet_codec.BadSnapshot as error:
            log.warning("kept_snapshot_unreadable", seq=event.seq, why=str(error))
            continue
        if whole is not None and whole[1].through + 1 >= first:
            yield event, Snapshot(*whole)


async def refuse_foreign_stream(journal: Journal, position: ReadPosition) -> None:
    """Raise StoreAhead or JournalChanged if the store has folded another stream than that of `journal`.

    Raise JournalUnavailable if the journal does not answer. If the journal has dropped the event at the store's position, the
    streams cannot be compared and are assumed to be the same.
    """
    if not position.seq:
        return
    last = await journal.last_seq()
    if last < position.seq:
        raise StoreAhead(
            f"the state store has folded event {position.seq}, the stream ends at {last}. {StoreAhead.__doc__}"
        )
    if position.seq < await journal.first_seq():
        return
    async for batch in history(journal, position.seq - 1, position.seq):
        if batch and batch[0].id != position.id:
            raise JournalChanged(
                f"event {position.seq} of the stream is {batch[0].id}, the state store has folded {position.id} there. "
                f"{JournalChanged.__doc__}"
            )
