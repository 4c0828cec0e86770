"""Encodes events as CloudEvents 1.0 in structured mode (one JSON object), and decodes them.

Besides CloudEvents' own attributes: `sequence` (its position on the journal), `recordedtime` (when the journal recorded it),
and, if present, `correlation` (its incident) and `causation`.
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
SCHEMA = "urn:holdfast:event:v1:"  # followed by the kind: docs/reference/schemas/v1


def attributes(event: FollowedEvent) -> dict[str, object]:
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
        "data": json.loads(codec.encode_body(event.fact)),  # without values that JSON cannot represent
    }


def written(event: FollowedEvent) -> bytes:
    """Return an event as the body of a request."""
    return json.dumps(attributes(event), ensure_ascii=False).encode()


def event_of(attributes: Mapping[str, Any]) -> FollowedEvent:
    """Return the event of a JSON object. Raise ValueError if it is not an event, or of a kind unknown to this version."""
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
