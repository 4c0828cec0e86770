"""Defines the interfaces of the state store that replay needs beyond those of the projector."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, Self

from controller.ports import Archive, CatchUp, RowsRead, StateStore


class StoreSnapshot(Protocol):
    """A consistent view of a store: all reads return the state at the time when the view was opened."""

    reading: RowsRead

    async def locate(self, id: str) -> int | None:
        """Return the sequence number of the stored event with this CloudEvents id, or None if no such event is stored."""

    def events(self, after: int) -> AsyncIterator[Sequence[Sequence[object]]]:
        """Yield the rows of `fleet_events` with a sequence number above `after`, in order, in batches of rows."""


class HistoryStore(StateStore, Archive, Protocol):
    """A state store that gives access to its past events, and lets a rebuild replace its content."""

    def reading(self) -> AbstractAsyncContextManager[StoreSnapshot]:
        """Open a consistent view of the store's current state, in one REPEATABLE READ transaction."""

    async def beside(self) -> Self:
        """Create a second, empty store, into which a rebuild projects the journal."""

    async def discard(self, fresh: Self) -> None:
        """Drop the second store that `beside` created."""

    async def swap(self, fresh: Self, catch_up: CatchUp, *, carry: bool) -> None:
        """Replace this store's content with that of `fresh`, in one transaction.

        Before the replacement, `catch_up` is called to project events into `fresh` up to this store's position in the journal.
        If `carry` is true, this store's records of events before the first event of `fresh` are kept, because the journal has
        dropped those events.
        """

    async def close(self) -> None:
        """Close the connections to the store."""
