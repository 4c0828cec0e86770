"""Defines the interfaces of a state store that replay needs beyond those that the projector uses."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, Self

from controller.ports import Archive, CatchUp, RowsRead, StateStore


class StoreSnapshot(Protocol):
    """A consistent view of a store: all reads return the state at the time when the view was opened."""

    reading: RowsRead

    async def locate(self, id: str) -> int | None:
        """Return the sequence number of the stored event with this ce-id, or None if no such event is stored."""
        ...

    def events(self, after: int) -> AsyncIterator[Sequence[Sequence[object]]]:
        """Yield the rows of `fleet_events` with a sequence number above `after`, in order, in batches of rows."""
        ...


class HistoryStore(StateStore, Archive, Protocol):
    """A state store that gives access to its past events, and allows its content to be replaced by a rebuilt one."""

    def reading(self) -> AbstractAsyncContextManager[StoreSnapshot]:
        """Open a consistent view of the store's current state, in one REPEATABLE READ transaction."""
        ...

    async def beside(self) -> Self:
        """Create an empty second store, into which the journal can be projected again."""
        ...

    async def discard(self, fresh: Self) -> None:
        """Drop the second store that `beside` created."""
        ...

    async def swap(self, fresh: Self, catch_up: CatchUp, *, carry: bool) -> None:
        """Replace this store's content with that of `fresh`, in one transaction.

        Before the replacement, `catch_up` is called to bring `fresh` to this store's position. With `carry`, this store's records
        of events before the first event of `fresh` are kept, because the journal has dropped those events.
        """
        ...

    async def close(self) -> None:
        """Close the connections to the store."""
        ...
