"""Messages by which frontends count each other's requests in flight on each worker.

    kv.slots     a `SlotBatch` soon after requests begin, are prefilled, or end; a `ResendRequest` of a frontend that missed one

Core NATS, msgpack, not stored. Each instance of a frontend numbers its batches from 0. A frontend that finds a gap requests a
complete resend. A batch without events carries only the next number: every frontend sends one each second. A frontend that is
silent for long is considered gone, with all of its requests.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated

import msgspec

EVENTS_MAX = 256  # per batch
BLOCKS_MAX = 32_768  # per batch: a broker accepts one megabyte per message
HASH_BYTES = 8
_BIG_ENDIAN = sys.byteorder == "big"


# These are added to the loads that routing uses: a value that is not a number, or is negative, would corrupt them all.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Added(msgspec.Struct, tag="added", array_like=True, frozen=True):
    """A request was sent to a DP rank of a worker. See `SlotTracker.add`."""

    request: int | str
    worker: str
    instance: str
    rank: Count
    blocks: bytes  # `pack` of the sequence hashes of its prompt
    own_blocks: Count
    block_tokens: Annotated[int, msgspec.Meta(ge=1)]
    prefill_tokens: Count  # not prefilled yet
    expected_s: Seconds | None = None
    age_s: Seconds = 0.0  # since it began

    def __post_init__(self) -> None:
        if len(self.blocks) % HASH_BYTES:
            raise ValueError(f"{len(self.blocks)} bytes are no sequence hashes")


class Read(msgspec.Struct, tag="read", array_like=True, frozen=True):
    """The prompt of a request has been prefilled."""

    request: int | str


class Freed(msgspec.Struct, tag="freed", array_like=True, frozen=True):
    """A request ended."""

    request: int | str


SlotEvent = Added | Read | Freed


class SlotBatch(msgspec.Struct, tag="batch", array_like=True, frozen=True):
    """Changes of a frontend's requests, in order."""

    frontend: str
    life: str  # id of that frontend's instance: a successor has none of its requests
    number: int
    events: list[SlotEvent]
    whole: bool = False  # this batch and those after it are a complete resend, from the beginning


class ResendRequest(msgspec.Struct, tag="want", array_like=True, frozen=True):
    """A frontend may have missed something: it requests a complete resend from `of`, or from every frontend if `of` is empty."""

    frontend: str
    of: str = ""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(SlotBatch | ResendRequest).decode


def pack(blocks: Sequence[int]) -> bytes:
    """Return sequence hashes as bytes: 8 each, little endian."""
    packed = array("Q", blocks)
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> Sequence[int]:
    """Return the sequence hashes that `pack` encoded, as an array. Most are never looked at: as Python integers they would
    take five times the memory and most of the time."""
    blocks = array("Q")
    blocks.frombytes(packed)
    if _BIG_ENDIAN:
        blocks.byteswap()
    return blocks
