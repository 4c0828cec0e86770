"""Encodes and decodes facts as CloudEvents 1.0 in binary mode: metadata in headers, a JSON body.

The decoder ignores unknown fields of a body and gives missing optional fields their defaults, so that a newer version of Holdfast
may add an optional field. A fact with an unknown kind, or with an unknown value of an enumeration, was written by a newer version
of Holdfast. For such a fact the decoder raises `UnknownKind`, because a fleet state computed without the fact would silently be
wrong. For any other message that cannot be a fact of Holdfast, the decoder raises `BadEvent`. Every reader skips such a message
(`events.journal.messages`).

The rules for refusing a message never change. If two versions had different rules, they would compute different fleet states
from the same journal.
"""

import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from inspect import get_annotations
from math import copysign, isfinite, isnan
from sys import float_info
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

import msgspec
from msgspec import Meta

from events.errors import HoldfastError
from events.fact import Decision, Fact, Recorded
from events.json_types import Json
from events.versions import KINDS as KINDS

TYPE_PREFIX = "holdfast."
BODY_BYTES_MAX = 1024 * 1024  # of one event; Holdfast's largest events have about 10,000 bytes
NAME_CHARS_MAX = 600  # of a key of a database row: a Postgres index entry may have at most 2,704 bytes
# of an instant: a clock that lost its battery shows 1970, and after 2999 there is a margin for date arithmetic
YEAR_MIN, YEAR_MAX = (1970, 2999)


class UnknownKind(HoldfastError):
    """The journal holds an event of a kind that this version does not know. Upgrade Holdfast before reading on."""


class BadEvent(HoldfastError):
    """This is not an event of Holdfast: it is damaged, or another program wrote to the stream."""


INT_MAX = 2**53  # the largest integer that a JSON number holds exactly: 9 PB, or 285 years in microseconds

SIGNED = {"exit"}  # fields that may be negative: older facts give an exit by signal n as the status -n

_COUNT = Annotated[int, Meta(ge=0, le=INT_MAX)]
_SIGNED = Annotated[int, Meta(ge=-INT_MAX, le=INT_MAX)]
_INSTANT = Annotated[datetime, Meta(tz=True)]


@contextmanager
def with_value_checks(kinds: Iterable[type]) -> Iterator[None]:
    """While the context is open, let newly created msgspec decoders check the facts' counts and time zones, at almost no cost.

    `kinds` are the fact classes. A valid count is not negative, and fits into the number types of databases and JSON readers.
    Facts declare plain `int` and `datetime`, which do not express these limits. So the annotations of the classes, and of the
    dataclasses in their fields, are replaced by stricter ones while msgspec reads and caches them. A check of each fact after
    decoding would take a tenth of the time of a replay.
    """
    plain: dict[type, Json] = {}
    for kind in kinds:
        _narrow(kind, plain)
    try:
        yield
    finally:
        for kind, annotations in plain.items():
            kind.__annotations__ = annotations


def _narrow(kind: type, plain: dict[type, Json]) -> None:
    for each in kind.__mro__[:-1]:
        if each not in plain and (annotations := get_annotations(each)):
            plain[each] = annotations
            each.__annotations__ = {
                name: _of(given, _SIGNED if name in SIGNED else _COUNT, plain)
                for name, given in annotations.items()
            }


def _of(annotation: Any, number: object, plain: dict[type, Json]) -> Any:
    """Return `annotation` with every `int` replaced by `number`, and every `datetime` by a type that requires a time zone."""
    if annotation is int:
        return number
    if annotation is datetime:
        return _INSTANT
    if isinstance(annotation, type) and is_dataclass(annotation):
        _narrow(annotation, plain)
    origin, within = get_origin(annotation), get_args(annotation)
    if not within or origin in (Literal, Annotated):
        return annotation
    narrow = tuple(_of(each, number, plain) for each in within)
    return origin[narrow] if origin in (tuple, list, dict) else Union[narrow]  # noqa: UP007


_encode = msgspec.json.Encoder().encode
with with_value_checks(KINDS.values()):
    _decoders = {name: msgspec.json.Decoder(kind).decode for name, kind in KINDS.items()}
_UNREADABLE = (msgspec.MsgspecError, KeyError, ValueError, RecursionError)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
# fields that are keys of database rows, besides the names in a subject
_NAMES = {"source", "model", "canary_key", "canary", "incident"}
_of_kind = {
    kind: (
        tuple(
            f.name
            for f in fields(kind)
            if f.name in _NAMES or (f.name == "worker" and issubclass(kind, Decision))
        ),
        tuple(f.name for f in fields(kind) if f.type is datetime),
    )
    for kind in KINDS.values()
}
_LOOKED_AT = {name for name, kind in KINDS.items() if _of_kind[kind][1] or {*_of_kind[kind][0]} - {"model"}}


def new_id(now_ms: int | None = None) -> str:
    """Return a new UUIDv7 (RFC 9562 §5.7) as text: 48 bits of Unix milliseconds and 74 random bits. `now_ms` replaces the
    current time."""
    stamp = time.time_ns() // 1_000_000 if now_ms is None else now_ms  # noqa: TID251 (an id, not an order)
    value = (stamp & (1 << 48) - 1) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(UUID(int=value))


def encode_body(fact: Fact) -> bytes:
    """Return a fact's body as JSON bytes.

    JSON has no NaN and no infinity, so the encoder writes null for them. If a field that became null does not allow null, the
    fact is encoded again. In the second encoding, every NaN is 0, and every infinity is the largest float of its sign.

    Without the second encoding, every reader would fail to decode the fact, and would skip it. A skipped decision leaves a gap
    in the numbers of the decisions, and every reader that computes the fleet's state stops at the gap.
    """
    body = _encode(fact)
    if b"null" in body and not _readable(fact.kind(), body):
        return _encode(_finite(msgspec.to_builtins(fact)))
    return body


def _readable(kind: str, body: bytes) -> bool:
    try:
        _decoders[kind](body)
    except msgspec.MsgspecError:
        return False
    return True


def _finite(value: object) -> object:
    if isinstance(value, float) and not isfinite(value):
        return 0.0 if isnan(value) else copysign(float_info.max, value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def encode_headers(
    fact: Fact,
    *,
    id: str,
    source: str,
    source_number: int,
    said_at: datetime,
    through: int | None = None,
    correlation: str = "",
    causation: str = "",
    traceparent: str = "",
) -> dict[str, str]:
    """Return the message headers of a fact: the CloudEvents attributes, the deduplication id for NATS and Holdfast's own
    headers.

    The arguments have the meaning of the fields of `Recorded` with the same names. `traceparent` is the trace of the client
    request that the fact is about (W3C Trace Context), or empty.
    """
    headers = {
        "ce-specversion": "1.0",
        "ce-id": id,
        "ce-type": TYPE_PREFIX + fact.kind(),
        "ce-source": source,
        "ce-time": said_at.astimezone(UTC).isoformat(timespec="microseconds"),
        "ce-datacontenttype": "application/json",
        "Nats-Msg-Id": id,
        "source-number": str(source_number),
    }
    if through is not None:
        headers["through"] = str(through)
    optional = {"correlation": correlation, "causation": causation, "traceparent": traceparent}
    headers.update({name: value for name, value in optional.items() if value})
    return headers


# Matches the header lines that NATS writes for `encode_headers`, in that order. Headers for the broker may follow. This match
# takes a third of the time of a general header parser.
_NAME = rf"[!-\U0010ffff]{{0,{NAME_CHARS_MAX}}}"
_KIND, _NUMBER = "[a-z][a-z0-9_]{0,99}", "[0-9]{1,18}"
_WRITTEN = re.compile(
    rf"NATS/1\.0\r\nce-specversion: 1\.0\r\nce-id: ({_NAME})\r\nce-type: holdfast\.({_KIND})\r\nce-source: ({_NAME})\r\n"
    rf"ce-time: (2\S*\+00:00)\r\nce-datacontenttype: application/json\r\nNats-Msg-Id: \S*\r\nsource-number: ({_NUMBER})\r\n"
    rf"(?:through: ({_NUMBER})\r\n)?(?:correlation: ({_NAME})\r\n)?(?:causation: ({_NAME})\r\n)?(?:traceparent: \S*\r\n)?"
    r"(?:Nats-\S*: \S*\r\n)*\r\n"
).fullmatch
_type = re.compile(rf"holdfast\.({_KIND})").fullmatch
_number = re.compile(_NUMBER).fullmatch


def decode_written(seq: int, at: datetime, headers: bytes | None, body: bytes) -> Recorded | None:
    """Decode the event of one stream message, faster than `decode`, if `encode_headers` wrote the message's headers.

    Return None for headers in any other form. Raise UnknownKind or BadEvent as `decode` does.
    """
    written = _WRITTEN(headers.decode("utf-8", "replace")) if headers else None
    if written is None:
        return None
    id, kind, source, said, number, through, correlation, causation = written.groups("")
    if not (id and source):
        return None
    fact = _fact(kind, body)
    try:
        said_at = datetime.fromisoformat(said)
    except ValueError as error:
        raise _refusal(kind, body, error) from error
    return Recorded(
        seq,
        at,
        fact,
        id,
        source,
        int(number),
        int(through) if through else 0,
        correlation,
        causation,
        said_at,
    )


def decode(seq: int, at: datetime, headers: Mapping[str, str], body: bytes) -> Recorded:
    """Decode the event of one stream message with headers in any order.

    `seq` is the position of the message in the stream, and `at` the stream's time of the message. Raise UnknownKind if a newer
    version of Holdfast may have written the message, and BadEvent if the message is not a valid event.
    """
    named = _type(headers.get("ce-type", ""))
    if headers.get("ce-specversion") != "1.0" or named is None:
        raise BadEvent("the CloudEvents headers of a Holdfast fact are missing")
    return Recorded(
        seq=seq,
        at=at,
        id=_header(headers, "ce-id", least=1),
        source=_header(headers, "ce-source", least=1),
        source_number=_count(headers, "source-number"),
        through=_count(headers, "through"),
        correlation=_header(headers, "correlation"),
        causation=_header(headers, "causation"),
        said_at=_said_at(headers.get("ce-time", "")),
        fact=_fact(named[1], body),
    )


def _header(headers: Mapping[str, str], name: str, *, least: int = 0) -> str:
    value = headers.get(name, "")
    if not least <= len(value) <= NAME_CHARS_MAX or "\x00" in value:
        raise BadEvent(f"{name}: {value[:40]!r} is not a name of {least} to {NAME_CHARS_MAX} characters")
    return value


def _count(headers: Mapping[str, str], name: str) -> int:
    value = headers.get(name, "0")
    if _number(value) is None:
        raise BadEvent(f"{name}: {value[:40]!r} is not a number")
    return int(value)


def _said_at(text: str) -> datetime | None:
    if not text:
        return None
    try:
        said = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadEvent(f"ce-time: {error}") from error
    if said.tzinfo is None:
        raise BadEvent(f"ce-time: {text} has no time zone")
    _check_year("ce-time", said)
    return said


def _fact(kind: str, body: bytes) -> Fact:
    """Decode the fact of this kind from a message's body. Raise UnknownKind or BadEvent as `decode` does."""
    try:
        fact = _decoders[kind](body)
    except _UNREADABLE as error:
        raise _refusal(kind, body, error) from error
    if kind in _LOOKED_AT or len(body) > BODY_BYTES_MAX:
        _look_at(fact, body)
    return fact


def _refusal(kind: str, body: bytes, error: Exception) -> UnknownKind | BadEvent:
    """Return the error for a body that cannot be decoded: UnknownKind if a newer version of Holdfast may have written the fact,
    else BadEvent."""
    try:
        _check_size(body)
        _object(body)  # every fact's body is an object
    except (*_UNREADABLE, BadEvent) as damage:
        return BadEvent(f"its body is not a valid {kind}: {damage}")
    if kind not in KINDS:
        return UnknownKind(f"of the kind {kind!r}, which this version does not know")
    if str(error).startswith("Invalid enum value"):
        return UnknownKind(f"a {kind} with a word that this version does not know: {error}")
    return BadEvent(f"its body is not a valid {kind}: {error}")


def _look_at(fact: Fact, body: bytes) -> None:
    """Raise BadEvent if the body is too large, a name is invalid, or a year is outside the limits."""
    _check_size(body)
    names, instants = _of_kind[fact.__class__]
    for field in names:
        check_name(field, getattr(fact, field))
    for field in instants:
        _check_year(field, getattr(fact, field))


def _check_size(body: bytes) -> None:
    if len(body) > BODY_BYTES_MAX:
        raise BadEvent(f"its body has {len(body)} bytes; the limit is {BODY_BYTES_MAX}")


def check_name(what: str, name: str) -> None:
    """Raise BadEvent if `name` cannot be a key in Postgres. `what` describes the name in the error.

    Postgres accepts no NUL in a text, and its indexes accept no long text.
    """
    if len(name) > NAME_CHARS_MAX or "\x00" in name:
        raise BadEvent(
            f"{what}: {name[:40]!r} is not a name: it has {len(name)} characters, or contains a NUL"
        )


def _check_year(name: str, instant: datetime) -> None:
    if not YEAR_MIN <= instant.year <= YEAR_MAX:
        raise BadEvent(f"{name}: {instant} is not between the years {YEAR_MIN} and {YEAR_MAX}")


def decode_body(kind: str, body: bytes) -> Fact:
    """Decode a fact from its kind and its stored body, without headers. Raise UnknownKind or BadEvent as `decode` does."""
    decoder = _decoders.get(kind)
    if decoder is None:
        raise UnknownKind(f"the kind {kind!r} is unknown. {UnknownKind.__doc__}")
    try:
        return decoder(body)
    except _UNREADABLE as error:
        raise BadEvent(f"a {kind} cannot be decoded: {error}") from error


def to_json(value: object) -> str:
    """Return a fact as JSON text. Also accepts other frozen dataclasses, such as the states of deciders."""
    return _encode(value).decode()


def to_builtins(value: Any) -> Any:
    """Return a fact as plain JSON types (dicts, lists, strings and numbers). Also accepts other frozen dataclasses, such as the
    states of deciders."""
    return msgspec.to_builtins(value)
