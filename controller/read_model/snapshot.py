"""A settled fleet as bytes, for snapshots.

A snapshot belongs to the version of the deciders that folded it and to the shape of their states: both stand beside
the bytes, and a snapshot of another version is not read but folded anew from the journal. So nothing here needs to
be compatible with anything older.
"""

import hashlib
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import msgspec

from controller.deciders.fleet import Fleet
from events.errors import HoldfastError


class BadSnapshot(HoldfastError):
    """A kept snapshot cannot be read. The journal has everything that it holds."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Fleet).decode


def encode(fleet: Fleet) -> bytes:
    """Return a fleet as bytes."""
    return _encode(fleet)


def decode(data: bytes) -> Fleet:
    """Return the fleet of `encode`'s bytes. Raise BadSnapshot."""
    try:
        return _decode(data)
    except msgspec.MsgspecError as error:
        raise BadSnapshot(f"{error}. {BadSnapshot.__doc__}") from error


def _shape(kind: Any, seen: set[Any]) -> list[str]:
    """Name every field of every dataclass below `kind`, in a fixed order."""
    if kind in seen:
        return []
    seen.add(kind)
    found: list[str] = []
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        for field in fields(kind):
            found.append(f"{kind.__qualname__}.{field.name}: {hints[field.name]}")
            found += _shape(hints[field.name], seen)
    for part in get_args(kind):
        found += _shape(part, seen)
    return found


def _fingerprint() -> int:
    digest = hashlib.sha256("\n".join(_shape(Fleet, set())).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1  # fits an integer column


VERSION = _fingerprint()  # changes by itself when a field is added, so nobody must remember to raise it
