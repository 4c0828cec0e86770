"""Finds the workers that a fact names in any field, for the filter `--worker`."""

from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

from events import codec
from events.decisions import (
    GoldenAgreed,
    GoldenRetired,
    IncidentClosed,
    IncidentOpened,
    SpareActivated,
    SpareReleased,
)
from events.fact import Fact
from events.observations import GoldenDisputed, MoveRequested, RequestMigrated, RequestResumed

# Fields other than `worker` that hold the name of a worker, or several names.
OTHER_FIELDS: dict[type[Fact], tuple[str, ...]] = {
    GoldenAgreed: ("by", "tied"),
    GoldenDisputed: ("proposed_by",),
    GoldenRetired: ("outvoted_by",),
    MoveRequested: ("to",),
    RequestMigrated: ("source", "target"),
    RequestResumed: ("source", "target"),
    SpareActivated: ("replaces",),
    SpareReleased: ("returned",),
}
SUBJECT = "worker:"  # prefix of the subject of an incident about a worker
INCIDENTS = (IncidentOpened, IncidentClosed)


def _paths(kind: type[Fact]) -> tuple[tuple[str, ...], ...]:
    """Return the paths to worker names in a kind of fact.

    A path is one field that holds names, such as `("target",)`, or two fields, such as `("moves", "worker")`. Of two fields,
    the first holds objects, and the second is the field of these objects that holds a name."""
    found: list[tuple[str, ...]] = [
        (name,) for name in ("worker", *OTHER_FIELDS.get(kind, ())) if name in kind.__dataclass_fields__
    ]
    hints = get_type_hints(kind)
    for field in fields(kind):
        parts = (hints[field.name], *get_args(hints[field.name]))
        found += [(field.name, "worker") for part in parts if _has_worker(part)]
    return tuple(found)


def _has_worker(part: object) -> bool:
    return isinstance(part, type) and is_dataclass(part) and "worker" in part.__dataclass_fields__


PATHS = {kind: _paths(kind) for kind in codec.KINDS.values()}


def workers_of(fact: Fact) -> list[str]:
    """Return the names of the workers that a fact names, each once, including the subject of an incident.

    The result may also contain the name of an operator or the word `configured`. Facts about goldens can have these values in
    the fields `by` and `outvoted_by`.
    """
    found = [name for path in PATHS.get(type(fact), ()) for name in _names(fact, path)]
    if isinstance(fact, INCIDENTS) and fact.subject.startswith(SUBJECT):
        found.append(fact.subject.removeprefix(SUBJECT))
    return list(dict.fromkeys(name for name in found if name))


def _names(value: object, path: tuple[str, ...]) -> list[str]:
    if isinstance(value, tuple):
        return [name for part in value for name in _names(part, path)]
    return _names(getattr(value, path[0]), path[1:]) if path else [str(value)]
