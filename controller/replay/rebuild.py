"""Rebuilds the projection beside the old one, which serves until both are swapped in one transaction."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from controller.ports import ReadPosition, StoreAhead, StoreForbidden, StoreRefused
from controller.replay.store import HistoryStore
from controller.runtime.initial_fold import refuse_foreign_stream
from controller.runtime.projection.projector import Projector
from events.errors import HoldfastError
from events.journal.port import Journal, JournalChanged

NEAR = 1_000  # events left to project; few enough to stop the old projection meanwhile
ROUNDS_MAX = 20  # attempts to get within NEAR
LAST_BIT_S = 60.0
DISCARD_S = 10.0


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The result of a rebuild."""

    events: int
    position: int
    seconds: float
    foreign: bool  # whether the old projection belonged to another stream


async def rebuild(
    journal: Journal, store: HistoryStore, *, written: Callable[[int, int], None] = lambda seq, events: None
) -> Rebuilt:
    """Project the whole journal again, and replace the store's content with the result.

    The store's records of events that the journal has dropped are kept.
    """
    began = time.monotonic()
    foreign = await _is_foreign(journal, store)
    fresh = await store.beside()
    projector = Projector(journal, fresh, written=written)

    async def catch_up(position: ReadPosition) -> None:
        async with asyncio.timeout(LAST_BIT_S):
            await projector.catch_up(await journal.last_seq() if foreign else position.seq)

    try:
        await _come_near(journal, projector)
        await store.swap(fresh, catch_up, carry=not foreign and await journal.first_seq() > 1)
    except BaseException:
        await _discard(store, fresh)
        raise
    finally:
        await fresh.close()
    took = time.monotonic() - began
    return Rebuilt(projector.progress.events, projector.progress.projected, took, foreign)


async def _discard(store: HistoryStore, fresh: HistoryStore) -> None:
    """Drop the fresh projection after a failure. If dropping fails too, the next rebuild drops it."""
    with contextlib.suppress(HoldfastError, TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            await store.discard(fresh)


async def _come_near(journal: Journal, projector: Projector) -> None:
    """Project nearly all events while the old projection still runs."""
    for _ in range(ROUNDS_MAX):
        last = await journal.last_seq()
        await projector.catch_up(last)
        if await journal.last_seq() - last < NEAR:
            return


async def _is_foreign(journal: Journal, store: HistoryStore) -> bool:
    try:
        await refuse_foreign_stream(journal, await store.position())
    except StoreForbidden:
        raise
    except StoreRefused:  # tables are missing, possibly all; the rebuild creates them
        return False
    except (StoreAhead, JournalChanged):
        return True
    return False
