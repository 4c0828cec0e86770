"""Makes msgspec decoders check facts for valid counts and time zones.

A valid count is not negative, and fits into the number types of databases and JSON readers. Facts declare plain `int` and
`datetime`, which do not express this. Decoders that are created within `with_value_checks` check each value as they read it, at
almost no cost. A check of each fact after decoding would take a tenth of a replay.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from datetime import datetime
from inspect import get_annotations
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from msgspec import Meta

INT_MAX = 2**53  # what a JSON number holds exactly; 9 PB, 285 years of microseconds

SIGNED = {"exit"}  # fields that are not counts: an exit status of older facts was -n for a signal

_COUNT = Annotated[int, Meta(ge=0, le=INT_MAX)]
_SIGNED = Annotated[int, Meta(ge=-INT_MAX, le=INT_MAX)]
_INSTANT = Annotated[datetime, Meta(tz=True)]


@contextmanager
def with_value_checks(kinds: Iterable[type]) -> Iterator[None]:
    """Narrow the annotations of these dataclasses, and of those in their fields, while msgspec reads and caches them."""
    plain: dict[type, dict[str, Any]] = {}
    for kind in kinds:
        _narrow(kind, plain)
    try:
        yield
    finally:
        for kind, annotations in plain.items():
            kind.__annotations__ = annotations


def _narrow(kind: type, plain: dict[type, dict[str, Any]]) -> None:
    for each in kind.__mro__[:-1]:
        if each not in plain and (annotations := get_annotations(each)):
            plain[each] = annotations
            each.__annotations__ = {
                name: _of(given, _SIGNED if name in SIGNED else _COUNT, plain)
                for name, given in annotations.items()
            }


def _of(annotation: Any, number: Any, plain: dict[type, dict[str, Any]]) -> Any:
    """Return an annotation with a time zone required of every `datetime` in it, and `number` in place of every `int`."""
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
