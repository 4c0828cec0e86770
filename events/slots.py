"""What has each frontend in flight on which worker? What frontends say that keep count of each other's requests.

    kv.slots     a `SlotBatch` soon after requests begin, have been read, or end; a `Want` from whom something has escaped

Core NATS, msgpack, kept by nobody. Each life of a frontend numbers its batches from 0, so that what is lost on the way is
noticed; whoever notices asks to be told everything again. A batch without events says only which number comes next: a
frontend says so every second, and one that is silent for long is gone, with all that it had.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated

import msgspec

EVENTS_MAX = 256  # of a batch
BLOCKS_MAX = 32_768  # of a batch: a broker takes a megabyte at once
HASH_BYTES = 8
_BIG_ENDIAN = sys.byteorder == "big"


# What is added to the loads that choices are made by: a number that is none, or below nothing, would spoil them all.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Added(msgspec.Struct, tag="added", array_like=True, frozen=True):
    """A request goes to a DP rank of a worker. See `SlotTracker.add`."""

    request: int | str
    worker: str
    instance: str
    rank: Count
    blocks: bytes  # `pack` of the sequence hashes of its prompt
    own_blocks: Count
    block_tokens: Annotated[int, msgspec.Meta(ge=1)]
    prefill_tokens: Count  # still to be read
    expected_s: Seconds | None = None
    age_s: Seconds = 0.0  # since it began

    def __post_init__(self) -> None:
        if len(self.blocks) % HASH_BYTES:
            raise ValueError(f"{len(self.blocks)} bytes are no sequence hashes")


class Read(msgspec.Struct, tag="read", array_like=True, frozen=True):
    """Its prompt has been read."""

    request: int | str


class Freed(msgspec.Struct, tag="freed", array_like=True, frozen=True):
    """It is over."""

    request: int | str


SlotEvent = Added | Read | Freed


class SlotBatch(msgspec.Struct, tag="batch", array_like=True, frozen=True):
    """What has happened to a frontend's requests, in order."""

    frontend: str
    life: str  # of that frontend: another one has none of the requests of the one before
    number: int
    events: list[SlotEvent]
    whole: bool = False  # with this batch and those after it everything is told again, from the beginning


class Want(msgspec.Struct, tag="want", array_like=True, frozen=True):
    """Something may have escaped a frontend: it wants to be told everything by another one; `of` none: by everybody."""

    frontend: str
    of: str = ""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(SlotBatch | Want).decode


def pack(blocks: Sequence[int]) -> bytes:
    """Return sequence hashes as bytes: 8 each, little endian."""
    packed = array("Q", blocks)
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> Sequence[int]:
    """Return the sequence hashes that `pack` was given. An array: most are never looked
    at, and as numbers of Python's they would take five times the memory and most of the time."""
    blocks = array("Q")
    blocks.frombytes(packed)
    if _BIG_ENDIAN:
        blocks.byteswap()
    return blocks
