"""Finds an event by its sequence, its ce-id, or as `decision:N`."""

from controller.ports import Archive
from controller.runtime.bounded_read import held, history
from events.errors import HoldfastError
from events.fact import Decision, Recorded
from events.journal.port import Journal


class NoSuchEvent(HoldfastError):
    """The journal holds no such event. Name it by its sequence (8812), its ce-id, or as decision:N."""


async def find(journal: Journal, archive: Archive | None, reference: str) -> Recorded:
    """Return the event that `reference` names. Raise NoSuchEvent if there is none."""
    last = await journal.last_seq()
    seq = int(reference) if reference.isdecimal() else None
    if seq is None and archive is not None:
        seq = await archive.locate(reference)
    if seq is not None and archive is not None and seq < await journal.first_seq():
        async for batch in archive.select(after=seq - 1):
            if batch[0].seq == seq:
                return batch[0]
            break
    elif seq is not None and 0 < seq <= last:
        async for batch in history(journal, seq - 1, seq):
            for event in batch:
                return event
    elif seq is None and (found := await _scan(journal, reference, last)):
        return found
    raise NoSuchEvent(f"{reference}: {NoSuchEvent.__doc__}")


async def _scan(journal: Journal, reference: str, last: int) -> Recorded | None:
    """Search the journal from its beginning, for an event that the index does not contain (yet)."""
    async for batch in held(journal, 0, last):
        for event in batch:
            if event.id == reference or reference == name(event):
                return event
    return None


def name(event: Recorded) -> str:
    """Return the name that other events use to refer to this one."""
    return f"decision:{event.fact.number}" if isinstance(event.fact, Decision) else event.id


def cause(event: Recorded) -> str:
    """Return the name of this event's cause; "" if none is recorded."""
    if isinstance(event.fact, Decision) and event.fact.cause:
        return event.fact.cause
    return event.causation
