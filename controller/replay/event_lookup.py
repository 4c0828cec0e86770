"""Finds an event by its sequence number, its ce-id, or its decision number as `decision:N`."""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any

from controller.ports import Archive
from controller.read_model.rows import matches
from controller.replay import sentences
from controller.runtime.bounded_read import held, history
from events import codec
from events.errors import HoldfastError
from events.fact import Decision, Recorded
from events.journal.port import Journal


class NoSuchEvent(HoldfastError):
    """The journal holds no such event. Name it by its sequence (8812), its ce-id, or as decision:N."""


async def find(journal: Journal, archive: Archive | None, reference: str) -> Recorded:
    """Return the event that `reference` names: a sequence number, a ce-id or `decision:N`. Raise NoSuchEvent.

    `archive` is an index of the events. If it is None, the journal is searched."""
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
    """Search the whole journal for an event, because the archive may not contain the newest events yet.

    Return None if no event has this name."""
    async for batch in held(journal, 0, last):
        for event in batch:
            if event.id == reference or reference == name(event):
                return event
    return None


def name(event: Recorded) -> str:
    """Return the name by which other events refer to an event as their cause: `decision:N` for a decision, else the ce-id."""
    return f"decision:{event.fact.number}" if isinstance(event.fact, Decision) else event.id


def cause(event: Recorded) -> str:
    """Return the name of the event that caused an event, or "" if no cause is recorded."""
    if isinstance(event.fact, Decision) and event.fact.cause:
        return event.fact.cause
    return event.causation


DEEP_MAX = 200  # maximum length of a chain of causes


async def why(journal: Journal, archive: Archive | None, reference: str) -> list[Recorded]:
    """Return the event that `reference` names, followed by its cause, the cause of that cause, and so on.

    The chain ends at an event without a recorded cause, or with a cause that is not on the journal. Raise NoSuchEvent."""
    chain = [await find(journal, archive, reference)]
    while (before := cause(chain[-1])) and len(chain) < DEEP_MAX:
        try:
            found = await find(journal, archive, before)
        except NoSuchEvent:
            break  # the cause never reached the journal
        if found.seq >= chain[-1].seq:
            break  # this reference is wrong, because a cause precedes its effect on the journal
        chain.append(found)
    return chain


def lines(chain: Sequence[Recorded]) -> list[str]:
    """Format a chain of causes, as `why` returns it, as lines of text."""
    output = []
    for depth, event in enumerate(chain):
        lead = f"{'  ' * depth}because " if depth else ""
        output.append(f"{lead}{sentences.line(event, date=not depth)}  [{event.seq} {name(event)}]")
    if cause(chain[-1]):
        output.append(f"{'  ' * len(chain)}because of {cause(chain[-1])}, which the journal does not hold")
    return output


def as_json(event: Recorded) -> dict[str, Any]:
    """Return an event as plain JSON types. The field `text` describes it in a sentence."""
    return {
        "seq": event.seq,
        "at": event.at.isoformat(),
        "id": event.id,
        "name": name(event),
        "kind": event.fact.kind(),
        "text": sentences.sentence(event.fact),
        "cause": cause(event),
        "source": event.source,
        "correlation": event.correlation,
        "body": codec.to_builtins(event.fact),
    }


class JournalArchive:
    """An archive without a state store, which finds events by reading the journal from its beginning."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def locate(self, reference: str) -> int | None:
        """Return the sequence number of the event with this ce-id or name `decision:N`, or None if no such event exists."""
        async for batch in self._all(0):
            for event in batch:
                if reference in (event.id, name(event)):
                    return event.seq
        return None

    async def select(
        self,
        *,
        after: int = 0,
        since: datetime | None = None,
        worker: str | None = None,
        incident: str | None = None,
        request: str | None = None,
    ) -> AsyncIterator[Sequence[Recorded]]:
        """Yield the events that match all given conditions, in order, in batches. A condition of None matches every event."""
        async for batch in self._all(after):
            found = [
                event
                for event in batch
                if matches(event, since=since, worker=worker, incident=incident, request=request)
            ]
            if found:
                yield found

    async def _all(self, after: int) -> AsyncIterator[Sequence[Recorded]]:
        last = await self._journal.last_seq()
        async for batch in held(self._journal, after, last):
            yield batch
