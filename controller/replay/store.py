"""What replay asks of a state store, beyond what the projector does."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, Self

from controller.ports import Archive, CatchUp, RowsRead, StateStore


class StoreSnapshot(Protocol):
    """A store as of one instant: everything read from it belongs together."""

    reading: RowsRead

    async def locate(self, id: str) -> int | None:
        """Return under which sequence an event is kept, by its ce-id; None: it is not."""
        ...

    def events(self, after: int) -> AsyncIterator[Sequence[Sequence[Any]]]:
        """Yield the rows of `fleet_events` above a sequence, in order, in batches."""
        ...


class HistoryStore(StateStore, Archive, Protocol):
    """A state store that can be looked into, and made anew."""

    def reading(self) -> AbstractAsyncContextManager[StoreSnapshot]:
        """Hold the store as of one instant (one REPEATABLE READ transaction)."""
        ...

    async def beside(self) -> Self:
        """Make an empty store beside this one, for a fresh projection."""
        ...

    async def discard(self, fresh: Self) -> None:
        """Drop what `beside` made."""
        ...

    async def swap(self, fresh: Self, catch_up: CatchUp, *, carry: bool) -> None:
        """Put `fresh` in this store's place in one transaction, after `catch_up` has brought it to where this stands.

        With `carry`, what this store keeps of events from before the fresh one's first goes along: the journal has them no more.
        """
        ...

    async def close(self) -> None:
        """Let go of it."""
        ...
