"""Rebuilds the state store: projects the journal into new tables, then replaces the old tables."""

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

# if fewer events are left to project, the old projection can be stopped while they are projected
NEAR = 1_000
ROUNDS_MAX = 20  # maximum number of times that the end of the journal is approached
LAST_BIT_S = 60.0  # timeout in seconds for projecting the last events, while the old projection is stopped
DISCARD_S = 10.0  # timeout in seconds for dropping the new tables after a failure


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The result of a rebuild: number of events projected, last sequence number projected, and duration."""

    events: int
    position: int
    seconds: float
    foreign: bool  # whether the old projection belonged to a different stream than the journal's


async def rebuild(
    journal: Journal, store: HistoryStore, *, written: Callable[[int, int], None] = lambda seq, events: None
) -> Rebuilt:
    """Project the whole journal again, and replace the store's content with the result.

    Records of events that the journal has dropped are kept, unless the store was filled from a different stream. `written` is
    called after each batch, with the last sequence number projected and the batch's number of events.
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
    """Drop the new tables after a failed rebuild.

    An error is ignored, because the next rebuild drops these tables as well.
    """
    with contextlib.suppress(HoldfastError, TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            await store.discard(fresh)


async def _come_near(journal: Journal, projector: Projector) -> None:
    """Project events into the new tables until fewer than NEAR are left, in at most ROUNDS_MAX rounds.

    During these rounds, the running projector still updates the old tables."""
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
    except StoreRefused:  # some or all tables are missing, and the rebuild creates them
        return False
    except (StoreAhead, JournalChanged):
        return True
    return False
