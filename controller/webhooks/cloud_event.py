"""An event as CloudEvents 1.0 has it in structured mode: one JSON object, headers and body together; and back again.

Beside CloudEvents' own attributes: `sequence` (its place on the journal), `recordedtime` (when the journal took it), and where
there are any `correlation` (its incident) and `causation`.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from events import codec
from events.fact import Fact
from events.follow import FollowedEvent

TYPE = "application/cloudevents+json"
SCHEMA = "urn:holdfast:event:v1:"  # and the kind: docs/schemas/v1


def attributes(event: FollowedEvent) -> dict[str, Any]:
    """Return an event as a JSON object."""
    also = {"correlation": event.correlation, "causation": event.causation}
    return {
        "specversion": "1.0",
        "id": event.id,
        "type": event.type,
        "source": event.source,
        "subject": event.subject,
        "time": (event.time or event.at).isoformat(),
        "recordedtime": event.at.isoformat(),
        "sequence": str(event.seq),
        "datacontenttype": "application/json",
        "dataschema": f"{SCHEMA}{event.fact.kind()}",
        **{name: value for name, value in also.items() if value},
        "data": json.loads(codec.encode_body(event.fact)),  # without what JSON has no word for
    }


def written(event: FollowedEvent) -> bytes:
    """Return an event as the body of a request."""
    return json.dumps(attributes(event), ensure_ascii=False).encode()


def event_of(said: Mapping[str, Any]) -> FollowedEvent:
    """Return the event that a JSON object is. Raise ValueError if it is none, or of a kind that this version does not know."""
    try:
        kind = str(said["type"]).removeprefix(codec.TYPE_PREFIX)
        fact: Fact = msgspec.convert(said["data"], codec.KINDS[kind])
        return FollowedEvent(
            str(said["id"]),
            str(said["type"]),
            str(said["source"]),
            str(said["subject"]),
            datetime.fromisoformat(said["time"]),
            int(said["sequence"]),
            datetime.fromisoformat(said["recordedtime"]),
            str(said.get("correlation", "")),
            str(said.get("causation", "")),
            fact,
        )
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"this is no event of this version: {error!r}") from error
