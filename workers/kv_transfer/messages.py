"""What the two ends of a KV transfer say to each other, and what the target hands out beforehand.

    source ── Open ──▶ target                    ── Opened ──▶ source       where both know the fleet's key
    source ── Chunk, Chunk, … ──▶ target         on a socket its bytes follow; in shared memory they lie there
    source ── Ending ──▶ target                  ── Accepted or Refused ──▶ source

Refused may come at any time and ends the transfer; so does a connection that closes before Accepted.
"""

import sys
from array import array
from collections.abc import Sequence

import msgspec
import xxhash

VERSION = 1
Buffer = bytes | bytearray | memoryview
Words = bytes  # for messages with a field of that name
STATE_BYTES_MAX = 1 << 20


class Description(msgspec.Struct, array_like=True, frozen=True):
    """What blocks mean: two workers may exchange them only if all of this agrees. `block_bytes` is one shard's."""

    model: str
    revision: str
    dtype: str
    layers: int
    heads: int
    head_size: int
    block_size: int  # tokens
    block_bytes: int
    tp_size: int = 1
    rank: int = 0

    def difference(self, other: "Description") -> str:
        """Say in what another description differs from this one; empty if in nothing."""
        for name in self.__struct_fields__:
            if (ours := getattr(self, name)) != (theirs := getattr(other, name)):
                return f"{name} is {theirs!r} there and {ours!r} here"
        return ""

    def blocks(self, tokens: int) -> int:
        """Return how many blocks the KV of this many tokens fills."""
        return -(-tokens // self.block_size)


class TransferAddress(msgspec.Struct, array_like=True, frozen=True):
    """Where a target listens: a Unix socket for its own host, TCP for the others."""

    host: str
    port: int
    path: str = ""


class Grant(msgspec.Struct, array_like=True, frozen=True):
    """A reservation as its source sees it. `region` names the memory's file on the target's host, if it has one."""

    ticket: str
    endpoint: TransferAddress
    bytes: int
    seconds: float  # how long it lasts
    description: Description  # of the blocks that the target takes
    region: str = ""
    first_block: int = 0  # of the sequence; the target has those before it, and its bytes begin the region
    offer: Words = b""  # how a `Transport` writes into the region, in its own words


class Open(msgspec.Struct, tag="open", array_like=True, frozen=True):
    """A source has come for its reservation. `shared`: it writes into the region itself."""

    ticket: str
    description: Description
    shared: bool
    version: int = VERSION
    nonce: bytes = b""
    proof: bytes = (
        b""  # that the source knows the fleet's key: of the ticket, which is used once, and the nonce
    )


class Opened(msgspec.Struct, tag="opened", array_like=True, frozen=True):
    """The target knows the fleet's key, too, and takes what follows. Without a key it says nothing to an Open."""

    proof: bytes


class KvChunk(msgspec.Struct, tag="chunk", array_like=True, frozen=True):
    """`bytes` bytes lie at this offset of the region, or follow on the socket, and have this xxh3-64."""

    ticket: str
    number: int
    offset: int
    bytes: int
    xxh3: int


class Ending(msgspec.Struct, tag="end", array_like=True, frozen=True):
    """The source has stopped the stream and sent all. The KV of the first `computed` tokens is in the blocks."""

    ticket: str
    chunks: int
    computed: int
    count: int
    tokens: bytes  # ids, 4 bytes each, little endian
    digest: bytes  # their xxh3-128
    state: bytes = b""  # of sampling: the engine's own


class Accepted(msgspec.Struct, tag="accepted", array_like=True, frozen=True):
    """Every chunk is there and verified, and the tokens agree: the target has committed."""

    ticket: str


class TransferRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The target does not take it, or no longer. Nothing of it is left there."""

    reason: str


Message = Open | Opened | KvChunk | Ending | Accepted | TransferRefused


def packed(tokens: Sequence[int]) -> bytes:
    """Return token ids as they travel. Raise OverflowError for one that is negative or has more than 32 bits."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpacked(tokens: bytes) -> list[int]:
    """Return the ids that `packed` has packed. Raise ValueError if their bytes were cut."""
    ids = array("I")
    ids.frombytes(tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def digest(packed_tokens: bytes) -> bytes:
    """Return the digest by which two workers agree on the tokens of a request."""
    return xxhash.xxh3_128_digest(packed_tokens)
