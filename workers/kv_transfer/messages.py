"""What the two ends of a KV transfer say to each other, and what the target hands out beforehand.

    source ── Open ──▶ target                    ── Opened ──▶ source       where both know the fleet's key
    source ── Chunk, Chunk, … ──▶ target         on a socket its bytes follow; in shared memory they lie there
    source ── Ending ──▶ target                  ── Accepted or Refused ──▶ source

Refused may come at any time and ends the transfer; so does a connection that closes before Accepted.

A frame is four bytes of length and eight of xxh3-64 (little endian) of the msgpack value that follows, so that a
frame flipped in any byte is refused, and one that was cut is waited for until the deadline. `TransferSocket` sends and
receives them over a blocking socket, all of it before one deadline.
"""

import contextlib
import select
import socket
import struct
import sys
import time
from array import array
from collections.abc import Sequence

import msgspec
import xxhash

from events.errors import HoldfastError

VERSION = 1
Buffer = bytes | bytearray | memoryview
Words = bytes  # for messages with a field of that name
STATE_BYTES_MAX = 1 << 20
FRAME_BYTES_MAX = 8 << 20  # the ending has all tokens of the request and the state
_HEADER = struct.Struct("<IQ")
_encoder = msgspec.msgpack.Encoder()


class TransferFailed(HoldfastError):
    """The KV cache could not be transferred. The stream continues by re-prefill, or where it is."""


class RegionTaken(HoldfastError):
    """Another live process serves this instance's KV regions. Every instance needs its own name."""


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


_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Open | Opened | KvChunk | Ending | Accepted | TransferRefused
)


def framed(message: Message) -> bytes:
    """Return a message as it travels. Raise TransferFailed if it is too long."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise TransferFailed(f"a message of {len(body)} bytes is longer than {FRAME_BYTES_MAX}")
    return _HEADER.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


class TransferSocket:
    """A connected socket and the instant (time.monotonic) until which everything on it must have happened."""

    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        """Own this socket."""
        self._socket = connected
        self.deadline_s = deadline_s
        self.kind = "unix" if connected.family == socket.AF_UNIX else "tcp"
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message, payload: memoryview | None = None) -> None:
        """Send a message, and the bytes that belong to it. Raise TransferFailed."""
        frame = framed(message)
        try:
            self._socket.settimeout(self._left_s())
            self._socket.sendall(frame)
            if payload is not None:
                self._socket.settimeout(self._left_s())
                self._socket.sendall(payload)
        except OSError as error:
            raise _broken(error) from error

    def receive(self) -> Message:
        """Return the next message. Raise TransferFailed: it is damaged, the connection ended, the time is up."""
        header = bytearray(_HEADER.size)
        self.fill(memoryview(header))
        length, xxh3 = _HEADER.unpack(header)
        if length > FRAME_BYTES_MAX:
            raise TransferFailed(f"a message of {length} bytes is longer than {FRAME_BYTES_MAX}")
        body = bytearray(length)
        self.fill(memoryview(body))
        if xxhash.xxh3_64_intdigest(body) != xxh3:
            raise TransferFailed("a message is damaged: its checksum differs")
        try:
            return _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"a message is none of the transfer's: {error}") from error

    def fill(self, view: memoryview) -> None:
        """Receive exactly this many bytes into memory. Raise TransferFailed."""
        done = 0
        while done < len(view):
            try:
                self._socket.settimeout(self._left_s())
                got = self._socket.recv_into(view[done:])
            except OSError as error:
                raise _broken(error) from error
            if not got:
                raise TransferFailed("the connection was closed")
            done += got

    def readable(self) -> bool:
        """Say whether something has come, or the other side has closed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def break_off(self, how: int = socket.SHUT_RDWR) -> None:
        """Make the call that waits on this socket fail, from any thread. After SHUT_RD
        the other side can still be sent the reason."""
        with contextlib.suppress(OSError):  # it is broken already
            self._socket.shutdown(how)

    def close(self, last: Message | None = None, patience_s: float = 0.5) -> None:
        """Close, after a last message and what the other side was still saying: a reset would destroy that message."""
        try:
            if last is not None:
                self.deadline_s = time.monotonic() + patience_s
                self.send(last)
                self._socket.shutdown(socket.SHUT_WR)
                scratch = memoryview(bytearray(1 << 16))
                while True:
                    self.fill(scratch)
        except (OSError, TransferFailed):
            pass  # the other side has closed
        finally:
            self._socket.close()

    def _left_s(self) -> float:
        if (left_s := self.deadline_s - time.monotonic()) <= 0:
            raise TransferFailed("the time is up")
        return left_s


def _broken(error: OSError) -> TransferFailed:
    late = isinstance(error, TimeoutError)
    return TransferFailed("the time is up" if late else f"the connection broke: {error}")
