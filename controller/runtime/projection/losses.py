"""Does the store still hold what was projected into it? A truncated table, a lost row of the position and what an older
backup of some tables has brought back are noticed; going on would leave a hole that nobody sees.
"""

from controller.ports import StateStore, StoreLost
from controller.read_model.rows import audited
from controller.runtime.history import history
from events.journal.port import Journal, JournalChanged

READ_MAX = 1_000  # events of the journal that are looked at, at either end


async def refuse_lost_rows(journal: Journal, store: StateStore) -> None:
    """Raise StoreLost if the store lacks what it must hold; StoreUnavailable or JournalUnavailable."""
    position, look = await store.position(), await store.look()
    lost = list(look.lost)
    last = max(look.last, position.seq - READ_MAX)
    if "projection" not in lost and (
        await _lacks(journal, store, 0, min(look.first - 1, READ_MAX))
        or await _lacks(journal, store, last, position.seq)
    ):
        lost.append("fleet_events")
    if lost:
        raise StoreLost(f"rows are missing from {', '.join(lost)}. {StoreLost.__doc__}")


async def _lacks(journal: Journal, store: StateStore, after: int, until: int) -> bool:
    """Say whether an event of the journal is not kept, of those that must be. A repeated one is kept under its first sequence."""
    try:
        async for batch in history(journal, after, until):
            for event in batch:
                if audited(event.fact) and await store.locate(event.id) is None:
                    return True
    except JournalChanged:  # the journal does not begin so early any more
        return False
    return False
