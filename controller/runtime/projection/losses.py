"""Detects rows that the store has lost.

Causes are a truncated table, a lost position row, or tables restored from an older backup. Continuing to project would leave
an unnoticed gap.
"""

from controller.ports import StateStore, StoreLost
from controller.read_model.rows import audited
from controller.runtime.bounded_read import history
from events.journal.port import Journal, JournalChanged

READ_MAX = 1_000  # events of the journal to check, at either end


async def refuse_lost_rows(journal: Journal, store: StateStore) -> None:
    """Raise StoreLost if the store lacks rows that it must hold; StoreUnavailable or JournalUnavailable."""
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
    """Return whether the store lacks one of these events that it must hold. An event published twice is stored under
    its first sequence."""
    try:
        async for batch in history(journal, after, until):
            for event in batch:
                if audited(event.fact) and await store.locate(event.id) is None:
                    return True
    except JournalChanged:  # the journal has dropped these events meanwhile
        return False
    return False
