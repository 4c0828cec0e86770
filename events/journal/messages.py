"""Decodes messages of the stream, and detects messages that are not events of Holdfast.

A process with permission to publish can put any message on the stream. Every reader skips the same messages: in the place of
such a message it yields a `Skipped`, which does not change the fleet's state. Whether a message is skipped depends on the
message alone, so that the result is the same in every process, version and replay.

    not an event            headers other than those of an event, a body that is not a fact of the stated kind, an impossible
                            value, a subject other than the fact's, or a decision without the headers of `fence`
    perhaps a newer event   Holdfast's headers, and a kind or enum value that this version does not know: a reader that needs the
                            event stops (`StopsAt`), until Holdfast is upgraded or the event is quarantined (`EventQuarantined`)

The fence is the broker's check that the writer of a decision has read the last decision. This check counts every message on the
decisions' subjects, valid or not. So a `Skipped` records whether its message is on one of these subjects.
"""

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from operator import attrgetter
from typing import Any

from xxhash import xxh3_64_hexdigest

from events import codec, subjects
from events.codec import BadEvent, UnknownKind
from events.errors import QUARANTINE
from events.fact import Decision, Fact, Observation, Recorded, Skipped
from events.frozen import replace
from events.journal.broker import parse_headers
from events.journal.port import StopsAt
from events.observations import EventQuarantined

FENCE = "Nats-Expected-Last-Subject-Sequence"
SHOWN_CHARS_MAX = 300  # longest shown part of a subject, and of the reason for skipping
QUARANTINES = f"{subjects.OBSERVED}.event.*.{EventQuarantined.kind()}"

_DECIDED = f"{subjects.DECIDED}.".encode()
# Matches the first decision of an append, of which the broker has checked the fence, and the further ones of its atomic batch.
_fenced = re.compile(
    rf"\r\n{FENCE}: [0-9]+\r\n{FENCE}-Subject: {re.escape(subjects.DECIDED_ALL)}\r\n"
    rf"|\r\nNats-Batch-Sequence: (?!1\r)".encode()
).search
# a kind, the getter of the field that the kind's subject names, and the value of that field
_Place = tuple[type[Fact], Callable[[Any], Any], Any]
_places: dict[bytes, _Place] = {}  # the last correct observation on each subject; bounded
_PLACES_MAX = 8192


def read(seq: int, at: datetime, subject: bytes, headers: bytes | None, body: bytes) -> Recorded:
    """Return the event of a message, or a `Skipped` if the message is not an event. Never raises, whatever the message
    contains."""
    try:
        event = codec.decode_written(seq, at, headers, body)
        if event is None:
            event = codec.decode(seq, at, parse_headers(headers), body)
        fact, place = event.fact, _places.get(subject)
        if place is None or place[0] is not fact.__class__ or place[1](fact) != place[2]:
            _check_place(fact, subject, headers or b"")
        return event
    except BadEvent as error:
        return _skipped(seq, at, subject, body, str(error))
    except UnknownKind as error:
        return _skipped(seq, at, subject, body, str(error), unknown=_may_be(subject, headers))


def fence(after: int) -> dict[str, str]:
    """Return headers that make the broker refuse a decision if the decisions' subjects have a message newer than the
    sequence `after`."""
    return {FENCE: str(after), f"{FENCE}-Subject": subjects.DECIDED_ALL}


def _check_place(fact: Fact, subject: bytes, headers: bytes) -> None:
    """Raise BadEvent if the fact is on a wrong subject, or is a decision without the headers of `fence`.

    Cache the subject of a correct observation, so that the next observation on this subject is checked faster.
    """
    if isinstance(fact, Observation):
        named = attrgetter("entity" if fact.entity == "fleet" else fact.entity)
        codec.check_name(fact.entity, str(named(fact)))
    if subject != (right := subjects.subject(fact)).encode():
        raise BadEvent(f"its fact, {fact.kind()}, belongs on {right}")
    if isinstance(fact, Observation):
        if len(_places) >= _PLACES_MAX:
            _places.clear()
        _places[subject] = (fact.__class__, named, named(fact))
    elif not _fenced(headers):
        raise BadEvent(
            f"its decision, {fact.kind()}, was not written under the fence: no controller accepts it"
        )


def _skipped(
    seq: int, at: datetime, subject: bytes, body: bytes, why: str, *, unknown: bool = False
) -> Recorded:
    fact = Skipped(
        why=why[:SHOWN_CHARS_MAX],
        subject=subject[:SHOWN_CHARS_MAX].decode("utf-8", "replace"),
        bytes=len(body),
        decided=subject.startswith(_DECIDED),
        unknown=unknown,
    )
    return Recorded(seq, at, fact, place_id(subject, body))


def place_id(subject: bytes, body: bytes) -> str:
    """Return the id of a skipped message, computed from its subject and body.

    If a recreated stream has a different message at the same position, the ids differ. So a reader notices the change.
    """
    return f"skipped:{xxh3_64_hexdigest(subject + b' ' + body)}"


def quarantined_event(event: Recorded, by: Recorded, id: str) -> Recorded:
    """Return the `Skipped` that replaces the quarantined `event`, whether or not this version knows the kind of `event`.

    `by` is the `EventQuarantined`. `id` is the id of the skipped message (`place_id`).
    """
    fact, said = event.fact, by.fact
    assert isinstance(said, EventQuarantined)
    why = f"quarantined by {said.by or 'an operator'} at {by.seq}: {said.why}"[:SHOWN_CHARS_MAX]
    if isinstance(fact, Skipped):
        fact = replace(fact, why=why, unknown=False, quarantined=True)
    else:
        fact = Skipped(
            why=why,
            subject=subjects.subject(fact),
            bytes=len(codec.encode_body(fact)),
            decided=isinstance(fact, Decision),
            quarantined=True,
        )
    return Recorded(event.seq, event.at, fact, id)


def quarantines(event: Recorded) -> int | None:
    """Return the sequence of the earlier event that this event quarantines. Return None if this event quarantines no event."""
    fact = event.fact
    return fact.event if isinstance(fact, EventQuarantined) and 0 < fact.event < event.seq else None


def quarantine_subject(seq: int) -> str:
    """Return the subject of the message that quarantines the event at the sequence `seq` of the stream."""
    return QUARANTINES.replace("*", str(seq))


def stops_reader(event: Recorded, stops_at: StopsAt) -> bool:
    """Return whether a reader must stop at an event of a kind that this version of Holdfast does not know.

    `stops_at` states for which of these events the reader stops: all of them, only the decisions, or none.
    """
    fact = event.fact
    if not isinstance(fact, Skipped) or not fact.unknown:
        return False
    return stops_at == "all" or (stops_at == "decisions" and fact.decided)


def stops(event: Recorded) -> UnknownKind:
    """Return the error for a reader that stops at an event which may be from a newer version of Holdfast."""
    fact = event.fact
    assert isinstance(fact, Skipped)
    return UnknownKind(
        f"event {event.seq}, on {fact.subject}, is {fact.why}. If a newer Holdfast wrote it: Upgrade this one before "
        f"reading on. If not: `{QUARANTINE} {event.seq} --why TEXT` makes all readers skip it."
    )


def _may_be(subject: bytes, headers: bytes | None) -> bool:
    """Return whether a message may be an event from a newer version of Holdfast.

    This is so if its subject fits its kind. A decision must also have the headers of `fence`.
    """
    kind = parse_headers(headers).get("ce-type", "").removeprefix(codec.TYPE_PREFIX)
    prefix, *rest = subject.decode("utf-8", "replace").removeprefix("fleet.").split(".")
    if prefix == "decided":
        return rest == [kind] and _fenced(headers or b"") is not None
    return prefix == "observed" and len(rest) == 3 and rest[-1] == kind


def as_sent(headers: Mapping[str, str]) -> bytes:
    """Return message headers in the format in which NATS sends them."""
    return "".join(
        ["NATS/1.0\r\n", *(f"{name}: {value}\r\n" for name, value in headers.items()), "\r\n"]
    ).encode()
