"""Encodes a settled fleet for snapshots: as a blob in the state store, and in parts on the journal.

A snapshot belongs to the deciders version that folded it and to the shape of its states; both are stored with the bytes. A
snapshot of another version is not read: the fleet is folded again from the journal, so the encoding needs no compatibility.
But if the journal has dropped the earlier events, its own snapshot is the only source. So `Parts` also reads a snapshot of
another shape, if the fields that this version has added have defaults.
"""

import hashlib
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import get_args, get_type_hints

import msgspec

from controller.deciders.fleet import Fleet
from events.errors import HoldfastError
from events.observations import SnapshotKept
from events.order import Last, Position


class BadSnapshot(HoldfastError):
    """A kept snapshot cannot be read. The journal has everything that it holds."""


PART_BYTES = 512 * 1024  # of a part, before base64: an event has a megabyte at most
PARTS_MAX = 4096
BLOB_BYTES_MAX = 1 << 30  # decompressed

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Fleet).decode


def encode(fleet: Fleet) -> bytes:
    """Return a fleet encoded as bytes."""
    return _encode(fleet)


def decode(data: bytes) -> Fleet:
    """Return the fleet encoded in these bytes. Raise BadSnapshot."""
    try:
        return _decode(data)
    except msgspec.MsgspecError as error:
        raise BadSnapshot(f"{error}. {BadSnapshot.__doc__}") from error


def _shape(kind: object, seen: set[object]) -> list[str]:
    """List every field of every dataclass below `kind`, in a fixed order."""
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


VERSION = _fingerprint()  # changes automatically when a field is added


class _Blob(msgspec.Struct):
    fleet: bytes
    sources: dict[str, tuple[int, datetime]]


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Blob).decode


def snapshot_due(decided: int, kept: int, every: int) -> bool:
    """Return whether the state store should keep another snapshot now.

    `decided` and `kept` are the sequences of the last decision, and of the last one that a snapshot contains. The first snapshot
    is kept with the first decision, then one each time the history has doubled, then one after `every` events. So a process that
    starts without the broker always finds a snapshot, and folds no more events after it than the snapshot contains.
    """
    return decided > kept and decided - kept >= min(every, kept)


def parts(
    fleet: Fleet, position: Position, sources: Mapping[str, Last], *, id: str, since: datetime
) -> list[SnapshotKept]:
    """Return a settled fleet as facts for the journal. `since`: the stream's time of the oldest event to be read with it."""
    blob = zlib.compress(_pack(_Blob(encode(fleet), dict(sources))), 1)
    pieces = [blob[start : start + PART_BYTES] for start in range(0, len(blob), PART_BYTES)]
    return [
        SnapshotKept(
            snapshot=id,
            part=number,
            parts=len(pieces),
            shape=VERSION,
            through=position.through,
            decided=position.decided,
            number=position.number,
            since=since,
            data=b64encode(piece).decode(),
        )
        for number, piece in enumerate(pieces, 1)
    ]


class Parts:
    """Reassembles the snapshots of a journal from their parts, in the journal's order."""

    def __init__(self) -> None:
        self._first: SnapshotKept | None = None
        self._pieces: list[bytes] = []

    def take(self, fact: SnapshotKept) -> tuple[Fleet, Position, dict[str, Last]] | None:
        """Add a part; return the snapshot if it is complete. Incomplete snapshots are dropped. Raise BadSnapshot."""
        if fact.part == 1:
            self._first, self._pieces = fact, []
        if self._first is None or fact.snapshot != self._first.snapshot:
            return None  # its first part is missing, or another controller published one at the same time
        if fact.part != len(self._pieces) + 1:
            self._first = None
            return None
        if fact.parts > PARTS_MAX:
            raise BadSnapshot(f"a snapshot of {fact.parts} parts; at most {PARTS_MAX}. {BadSnapshot.__doc__}")
        try:
            self._pieces.append(b64decode(fact.data, validate=True))
            if fact.part < fact.parts:
                return None
            inflate = zlib.decompressobj()
            blob = _unpack(inflate.decompress(b"".join(self._pieces), BLOB_BYTES_MAX))
        except (ValueError, zlib.error, msgspec.MsgspecError) as error:
            raise BadSnapshot(f"{error}. {BadSnapshot.__doc__}") from error
        self._first = None
        return decode(blob.fleet), Position(fact.through, fact.decided, fact.number), blob.sources
