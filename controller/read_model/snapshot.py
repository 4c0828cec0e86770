"""Encodes a fleet's state as a snapshot: as a blob for the state store, or in parts for the journal.

The fleet must be settled: its state contains every decision, and the observations up to the last decision. The state store
keeps a snapshot with the deciders version and a fingerprint of all state fields (`VERSION`). A stored snapshot with another
fingerprint or an unsupported deciders version is ignored, and the state is folded from the journal again. The encoding
therefore needs no compatibility between releases.

If the journal has dropped its earlier events, a snapshot on the journal can be the only source of the state. `Parts` therefore
also reads a snapshot with another fingerprint, if all fields that this release has added have defaults.
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
    """A kept snapshot cannot be read. The journal has the events from which it was made."""


# bytes of a part before base64, so that its event stays below the maximum of one megabyte
PART_BYTES = 512 * 1024
PARTS_MAX = 4096  # maximum number of parts of a snapshot that is read
BLOB_BYTES_MAX = 1 << 30  # maximum bytes of a decompressed snapshot

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Fleet).decode


def encode(fleet: Fleet) -> bytes:
    """Encode a fleet as MessagePack."""
    return _encode(fleet)


def decode(data: bytes) -> Fleet:
    """Decode a fleet from the result of `encode`. Raise BadSnapshot if `data` does not decode to a fleet."""
    try:
        return _decode(data)
    except msgspec.MsgspecError as error:
        raise BadSnapshot(f"{error}. {BadSnapshot.__doc__}") from error


def _shape(kind: object, seen: set[object]) -> list[str]:
    """List all fields, with their types, of a dataclass and of the dataclasses nested in it, in a fixed order.

    A type in `seen` is skipped, and each type found is added to `seen`."""
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


VERSION = _fingerprint()  # changes whenever a field of the fleet state is added, removed or changes its type


class _Blob(msgspec.Struct):
    fleet: bytes
    sources: dict[str, tuple[int, datetime]]


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Blob).decode


def snapshot_due(decided: int, kept: int, every: int) -> bool:
    """Return whether the state store should keep another snapshot now.

    `decided` is the sequence number of the last decision. `kept` is the sequence number of the last decision in the newest kept
    snapshot, 0 without one. The first snapshot is due after the first decision. Each further snapshot is due when the sequence
    number has doubled since the previous snapshot or has grown by `every`, whichever comes first.

    From the first decision on, a process therefore finds a snapshot, even if it starts without the broker. The process then
    folds the later events. There are at most as many events after the snapshot as before the snapshot.
    """
    return decided > kept and decided - kept >= min(every, kept)


def parts(
    fleet: Fleet, position: Position, sources: Mapping[str, Last], *, id: str, since: datetime
) -> list[SnapshotKept]:
    """Encode a settled fleet as a snapshot, and return its parts as facts for the journal.

    `id` names the snapshot. `since` is the time, by the stream's clock, of the oldest event that must be read together with the
    snapshot.
    """
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
    """Reassembles snapshots from their parts on a journal. The parts must be added in the order of the journal."""

    def __init__(self) -> None:
        self._first: SnapshotKept | None = None
        self._pieces: list[bytes] = []

    def take(self, fact: SnapshotKept) -> tuple[Fleet, Position, dict[str, Last]] | None:
        """Add a part. If this part completes a snapshot, return the snapshot, else None.

        The snapshot is the fleet, its position and the last event of each source. A snapshot with a missing part is dropped.
        Raise BadSnapshot if the part or the completed snapshot cannot be decoded.
        """
        if fact.part == 1:
            self._first, self._pieces = fact, []
        if self._first is None or fact.snapshot != self._first.snapshot:
            return None  # the first part is missing, or two controllers published snapshots at the same time
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
