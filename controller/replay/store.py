"""The interface that replay needs from a state store, beyond what the projector uses."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, Self

from controller.ports import Archive, CatchUp, RowsRead, StateStore


class StoreSnapshot(Protocol):
    """A consistent view of a store at one instant: all reads return the state of that instant."""

    reading: RowsRead

    async def locate(self, id: str) -> int | None:
        """Return the sequence at which an event is stored, by its ce-id; None if it is not stored."""
        ...

    def events(self, after: int) -> AsyncIterator[Sequence[Sequence[object]]]:
        """Yield the rows of `fleet_events` above a sequence, in order, in batches."""
        ...


class HistoryStore(StateStore, Archive, Protocol):
    """A state store that can be inspected and rebuilt."""

    def reading(self) -> AbstractAsyncContextManager[StoreSnapshot]:
        """Open a view of the store at one instant (one REPEATABLE READ transaction)."""
        ...

    async def beside(self) -> Self:
        """Create an empty store beside this one, for a fresh projection."""
        ...

    async def discard(self, fresh: Self) -> None:
        """Drop a store that `beside` created."""
        ...

    async def swap(self, fresh: Self, catch_up: CatchUp, *, carry: bool) -> None:
        """Replace this store's content with `fresh` in one transaction, after `catch_up` brought it to this store's position.

        With `carry`, also keep this store's records of events before the first one of `fresh`: the journal has dropped them.
        """
        ...

    async def close(self) -> None:
        """Close the store."""
        ...
