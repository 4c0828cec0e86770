"""Encodes events as CloudEvents 1.0 in structured mode (one JSON object), and decodes them.

An encoded event has the standard attributes of CloudEvents. It also has `sequence` (its position on the journal) and
`recordedtime` (when the journal recorded it). The attributes `correlation` (the id of its incident) and `causation` (the id of
the event that caused it) are added if they are known.
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
SCHEMA = "urn:holdfast:event:v1:"  # followed by the event's kind; see docs/reference/schemas/v1


def attributes(event: FollowedEvent) -> dict[str, object]:
    """Return the attributes of an event's CloudEvent, as plain JSON values."""
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
        "data": json.loads(codec.encode_body(event.fact)),  # without values that JSON cannot represent
    }


def written(event: FollowedEvent) -> bytes:
    """Return an event's CloudEvent, encoded as JSON for the body of a request."""
    return json.dumps(attributes(event), ensure_ascii=False).encode()


def event_of(attributes: Mapping[str, Any]) -> FollowedEvent:
    """Decode a CloudEvent's attributes to an event.

    Raise ValueError if the attributes do not describe an event, or if the event's kind is unknown to this release.
    """
    try:
        kind = str(attributes["type"]).removeprefix(codec.TYPE_PREFIX)
        fact: Fact = msgspec.convert(attributes["data"], codec.KINDS[kind])
        return FollowedEvent(
            str(attributes["id"]),
            str(attributes["type"]),
            str(attributes["source"]),
            str(attributes["subject"]),
            datetime.fromisoformat(attributes["time"]),
            int(attributes["sequence"]),
            datetime.fromisoformat(attributes["recordedtime"]),
            str(attributes.get("correlation", "")),
            str(attributes.get("causation", "")),
            fact,
        )
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"not an event known to this version: {error!r}") from error
