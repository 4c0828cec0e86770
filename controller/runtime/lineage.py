"""Is this store a projection of this stream? A database restored from elsewhere, or a stream made anew, is not.

Folding the one on top of the other would mix two histories without anyone knowing.
"""

from controller.ports import ReadPosition, StoreAhead
from controller.runtime.history import history
from events.journal.port import Journal, JournalChanged


async def refuse_foreign_stream(journal: Journal, place: ReadPosition) -> None:
    """Raise StoreAhead or JournalChanged if a store's place does not lie on this stream; JournalUnavailable."""
    if not place.seq:
        return
    last = await journal.last_seq()
    if last < place.seq:
        raise StoreAhead(
            f"the state store has folded event {place.seq}, the stream ends at {last}. {StoreAhead.__doc__}"
        )
    async for batch in history(journal, place.seq - 1, place.seq):
        if batch and batch[0].id != place.id:
            raise JournalChanged(
                f"event {place.seq} of the stream is {batch[0].id}, the state store has folded {place.id} there. "
                f"{JournalChanged.__doc__}"
            )
