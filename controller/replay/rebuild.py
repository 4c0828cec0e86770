"""A fresh projection beside the old one, swapped in one transaction, while the old one keeps serving."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from controller.ports import StoreAhead
from controller.replay.store import HistoryStore
from controller.runtime.projector import Projector, refuse_foreign_stream
from events.errors import HoldfastError
from events.journal.port import Journal, JournalChanged

SWAPS_MAX = 50  # attempts to overtake a projector that is at work


class NotOvertaken(HoldfastError):
    """The fresh projection never caught up with the one at work. Try again when there is less load."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a rebuild did."""

    events: int
    position: int
    seconds: float
    foreign: bool  # the old projection was of another stream


async def rebuild(
    journal: Journal, store: HistoryStore, *, written: Callable[[int, int], None] = lambda seq, events: None
) -> Rebuilt:
    """Project the whole journal anew and put the result in the store's place. Raise NotOvertaken."""
    began = time.monotonic()
    foreign = await _is_foreign(journal, store)
    fresh = await store.beside()
    try:
        projector = Projector(journal, fresh, written=written)
        for _ in range(SWAPS_MAX):
            last = await journal.last_seq()
            await projector.catch_up(last)
            if await store.swap(fresh, foreign=foreign):
                took = time.monotonic() - began
                return Rebuilt(projector.progress.events, projector.progress.projected, took, foreign)
    finally:
        await fresh.close()
    raise NotOvertaken


async def _is_foreign(journal: Journal, store: HistoryStore) -> bool:
    try:
        await refuse_foreign_stream(journal, await store.place())
    except (StoreAhead, JournalChanged):
        return True
    return False
