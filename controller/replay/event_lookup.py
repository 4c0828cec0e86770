"""Finds an event by its sequence number, CloudEvents id (ce-id) or decision number (`decision:N`)."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from controller.ports import Archive
from controller.read_model.rows import EventFilter, matches
from controller.replay import sentences
from controller.replay.store import HistoryStore
from controller.runtime.bounded_read import held, history
from events import codec
from events.errors import HoldfastError
from events.fact import Decision, Recorded
from events.journal.port import Journal


class NoSuchEvent(HoldfastError):
    """The journal holds no such event. Name it by its sequence (8812), its ce-id, or as decision:N."""


async def find(journal: Journal, archive: Archive | None, reference: str) -> Recorded:
    """Return the event that `reference` names by its sequence number, its CloudEvents id, or `decision:N`.

    Ids are looked up in `archive`, an index of the journal's events. If `archive` is None or lacks an id, the journal is
    searched. Raise NoSuchEvent if no event matches."""
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
    """Return the journal's event with this CloudEvents id or `decision:N`, or None if there is none.

    The journal is read up to the sequence number `last`. The search also finds the newest events, which an archive may not
    contain yet."""
    async for batch in held(journal, 0, last):
        for event in batch:
            if event.id == reference or reference == name(event):
                return event
    return None


def name(event: Recorded) -> str:
    """Return the name by which other events refer to `event` as their cause.

    This is `decision:N` for a decision, and the CloudEvents id for any other event."""
    return f"decision:{event.fact.number}" if isinstance(event.fact, Decision) else event.id


def cause(event: Recorded) -> str:
    """Return the name of the event that caused an event, or "" if no cause is recorded."""
    if isinstance(event.fact, Decision) and event.fact.cause:
        return event.fact.cause
    return event.causation


DEEP_MAX = 200  # maximum length of a chain of causes


async def why(journal: Journal, archive: Archive | None, reference: str) -> list[Recorded]:
    """Return the event that `reference` names, followed by its cause, the cause of that cause, and so on.

    The chain ends at the first event for which no cause is recorded or found, or after DEEP_MAX events. Raise NoSuchEvent if
    `reference` names no event."""
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
    """Return lines of text that describe the chain of causes from `why`."""
    output = []
    for depth, event in enumerate(chain):
        lead = f"{'  ' * depth}because " if depth else ""
        output.append(f"{lead}{sentences.line(event, date=not depth)}  [{event.seq} {name(event)}]")
    if cause(chain[-1]):
        output.append(f"{'  ' * len(chain)}because of {cause(chain[-1])}, which the journal does not hold")
    return output


def as_json(event: Recorded) -> dict[str, Any]:
    """Return an event as plain JSON types. The field `text` describes the event in a sentence."""
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


@dataclass(frozen=True, slots=True)
class JournalArchive:
    """An event archive for a fleet without a state store.

    It finds events by reading the journal from the oldest event on."""

    journal: Journal

    async def locate(self, reference: str) -> int | None:
        """Return the sequence number of the event that `reference` names; None if no such event exists.

        `reference` is a CloudEvents id or `decision:N`."""
        async for batch in held(self.journal, 0, await self.journal.last_seq()):
            for event in batch:
                if reference in (event.id, name(event)):
                    return event.seq
        return None

    async def select(self, **wanted: Unpack[EventFilter]) -> AsyncIterator[Sequence[Recorded]]:
        """Yield batches of the events that meet all given conditions, in order. A condition of None excludes no event."""
        last = await self.journal.last_seq()
        async for batch in held(self.journal, wanted.get("after", 0), last):
            if found := [event for event in batch if matches(event, wanted)]:
                yield found


@dataclass(frozen=True, slots=True)
class FleetHistory:
    """The journal and the state store of one fleet. If `store` is None, only the journal is read."""

    journal: Journal
    store: HistoryStore | None

    @property
    def archive(self) -> Archive:
        """The archive in which events are looked up: the state store, or the journal if there is no store."""
        return JournalArchive(self.journal) if self.store is None else self.store
