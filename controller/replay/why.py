"""The chain of causes of an event, back to the first observation."""

from collections.abc import Sequence
from typing import Any

from controller.ports import Archive
from controller.replay import sentences
from controller.replay.event_lookup import NoSuchEvent, cause, find, name
from events import codec
from events.fact import Recorded
from events.journal.port import Journal

DEEP_MAX = 200


async def why(journal: Journal, archive: Archive | None, reference: str) -> list[Recorded]:
    """Return the event and its causes, the first cause last. Raise NoSuchEvent if there is no such event."""
    chain = [await find(journal, archive, reference)]
    while (before := cause(chain[-1])) and len(chain) < DEEP_MAX:
        try:
            found = await find(journal, archive, before)
        except NoSuchEvent:
            break  # the cause never reached the journal
        if found.seq >= chain[-1].seq:
            break  # a cause precedes its effect on the journal
        chain.append(found)
    return chain


def lines(chain: Sequence[Recorded]) -> list[str]:
    """Format a chain of causes as lines of text."""
    output = []
    for depth, event in enumerate(chain):
        lead = f"{'  ' * depth}because " if depth else ""
        output.append(f"{lead}{sentences.line(event, date=not depth)}  [{event.seq} {name(event)}]")
    if cause(chain[-1]):
        output.append(f"{'  ' * len(chain)}because of {cause(chain[-1])}, which the journal does not hold")
    return output


def as_json(event: Recorded) -> dict[str, Any]:
    """Return an event as plain JSON types, with its sentence."""
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
