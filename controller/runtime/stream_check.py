"""Checks that a store is a projection of this stream.

After a restore from elsewhere or a recreation of the stream it is not, and folding would silently mix two histories.
"""

from controller.ports import ReadPosition, StoreAhead
from controller.runtime.bounded_read import history
from events.journal.port import Journal, JournalChanged


async def refuse_foreign_stream(journal: Journal, position: ReadPosition) -> None:
    """Raise StoreAhead or JournalChanged if a store's position does not lie on this stream; JournalUnavailable.

    A position that the journal has dropped cannot be compared, and is assumed to be its own.
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
