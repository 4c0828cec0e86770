"""Messages by which frontends count each other's requests in flight on each worker.

    kv.slots     a `SlotBatch` soon after requests begin, are prefilled, or end;
                 a `ResendRequest` of a frontend that may have missed a `SlotBatch`

The lines show the subject and its messages, which are msgpack on core NATS and are not stored. Each instance of a frontend
numbers its `SlotBatch` messages from 0. A frontend that finds a gap requests a complete resend. Each second, every frontend also
sends a `SlotBatch` without events, which contains only the next number. A frontend that is silent for long is considered gone,
and its requests are no longer counted.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated

import msgspec

EVENTS_MAX = 256  # most events of one SlotBatch
BLOCKS_MAX = 32_768  # most block hashes of one SlotBatch: a broker accepts one megabyte per message
HASH_BYTES = 8
_BIG_ENDIAN = sys.byteorder == "big"


# These values are added to the loads that routing uses. A negative value, or NaN, would corrupt all loads.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Added(msgspec.Struct, tag="added", array_like=True, frozen=True):
    """A request was sent to a DP rank of a worker.

    `own_blocks` is the number of blocks that no other request can share, because their prompt has no hashes. `block_tokens` is
    the size of a block in tokens. `expected_s` is the predicted prefill time in seconds, if known.
    """

    request: int | str
    worker: str
    instance: str
    rank: Count
    blocks: bytes  # the sequence hashes of the request's prompt, as `pack` encodes them
    own_blocks: Count
    block_tokens: Annotated[int, msgspec.Meta(ge=1)]
    prefill_tokens: Count  # number of prompt tokens that are not prefilled yet
    expected_s: Seconds | None = None
    age_s: Seconds = 0.0  # seconds since the request began

    def __post_init__(self) -> None:
        if len(self.blocks) % HASH_BYTES:
            raise ValueError(f"{len(self.blocks)} bytes are no sequence hashes")


class Read(msgspec.Struct, tag="read", array_like=True, frozen=True):
    """The prompt of a request has been prefilled, so its prompt tokens no longer count as load."""

    request: int | str


class Freed(msgspec.Struct, tag="freed", array_like=True, frozen=True):
    """A request has ended, so it no longer counts as load."""

    request: int | str


SlotEvent = Added | Read | Freed


class SlotBatch(msgspec.Struct, tag="batch", array_like=True, frozen=True):
    """Changes of one frontend's requests in flight, in order.

    `life` is the id of the frontend's instance. If `whole` is set, a complete resend begins with this message.
    """

    frontend: str
    life: str  # id of the frontend's instance; a later instance has none of its requests
    number: int
    events: list[SlotEvent]
    whole: bool = False  # this message and the later ones are a complete resend


class ResendRequest(msgspec.Struct, tag="want", array_like=True, frozen=True):
    """A request for a complete resend, from a frontend that may have missed a `SlotBatch`.

    The request goes to the frontend `of`, or to every frontend if `of` is empty.
    """

    frontend: str
    of: str = ""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(SlotBatch | ResendRequest).decode


def pack(blocks: Sequence[int]) -> bytes:
    """Return sequence hashes as bytes: 8 bytes each, little endian."""
    packed = array("Q", blocks)
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> Sequence[int]:
    """Return the sequence hashes that `pack` encoded, as an array.

    Most hashes are never read. As Python integers they would take five times the memory and most of the decoding time.
    """
    blocks = array("Q")
    blocks.frombytes(packed)
    if _BIG_ENDIAN:
        blocks.byteswap()
    return blocks
