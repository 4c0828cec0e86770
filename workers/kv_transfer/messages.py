"""The messages between the two ends of a KV transfer, and the grant that the target issues beforehand.

    source ── Open ──▶ target                    ── Opened ──▶ source       if both know the fleet's key
    source ── Chunk, Chunk, … ──▶ target         on a socket, followed by its bytes; in shared memory, they are in place
    source ── Ending ──▶ target                  ── Accepted or Refused ──▶ source

Refused may arrive at any time and ends the transfer. So does a connection that closes before Accepted.

A frame is four bytes of length and eight of xxh3-64 (little endian), followed by the msgpack value. A frame with a flipped
bit is therefore refused, and a truncated one is waited for until the deadline. `TransferSocket` sends and receives frames
over a blocking socket, all before one deadline.
"""

import contextlib
import select
import socket
import struct
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec
import xxhash

from events.errors import HoldfastError

VERSION = 1
Buffer = bytes | bytearray | memoryview
Words = bytes  # an alias for messages with a field named `bytes`
STATE_BYTES_MAX = 1 << 20
FRAME_BYTES_MAX = 8 << 20  # the ending carries all tokens of the request, and the state
_HEADER = struct.Struct("<IQ")
_encoder = msgspec.msgpack.Encoder()


class TransferFailed(HoldfastError):
    """The KV cache could not be transferred. The stream continues by re-prefill, or at its source."""


class RegionTaken(HoldfastError):
    """Another live process serves this instance's KV regions. Every instance needs its own name."""


class Description(msgspec.Struct, array_like=True, frozen=True):
    """The format of KV blocks. Two workers may exchange blocks only if all fields agree. `block_bytes` is per shard."""

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
        """Describe the first difference of another description; empty if there is none."""
        for name in self.__struct_fields__:
            if (ours := getattr(self, name)) != (theirs := getattr(other, name)):
                return f"{name} is {theirs!r} there and {ours!r} here"
        return ""

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks that the KV of this many tokens fills."""
        return -(-tokens // self.block_size)


class TransferAddress(msgspec.Struct, array_like=True, frozen=True):
    """Where a target listens: a Unix socket for its own host, TCP for others."""

    host: str
    port: int
    path: str = ""


class Grant(msgspec.Struct, array_like=True, frozen=True):
    """A reservation as its source sees it. `region` is the path of the memory's file on the target's host, if any."""

    ticket: str
    endpoint: TransferAddress
    bytes: int
    seconds: float  # its duration
    description: Description  # of the blocks that the target accepts
    region: str = ""
    # of the sequence; the target has the blocks before it, and the region begins with it
    first_block: int = 0
    offer: Words = b""  # how a `Transport` writes into the region, in its own encoding


class Open(msgspec.Struct, tag="open", array_like=True, frozen=True):
    """A source opens its reservation. `shared`: it writes into the region itself."""

    ticket: str
    description: Description
    shared: bool
    version: int = VERSION
    nonce: bytes = b""
    proof: bytes = b""  # of the fleet's key, over the single-use ticket and the nonce


class Opened(msgspec.Struct, tag="opened", array_like=True, frozen=True):
    """The target knows the fleet's key too, and accepts what follows. Without a key it does not answer an Open."""

    proof: bytes


class KvChunk(msgspec.Struct, tag="chunk", array_like=True, frozen=True):
    """A chunk: `bytes` bytes at this offset of the region, or following on the socket, with this xxh3-64."""

    ticket: str
    number: int
    offset: int
    bytes: int
    xxh3: int


class Ending(msgspec.Struct, tag="end", array_like=True, frozen=True):
    """The source has stopped the stream and sent everything. The blocks hold the KV of the first `computed` tokens."""

    ticket: str
    chunks: int
    computed: int
    count: int
    tokens: bytes  # ids, 4 bytes each, little endian
    digest: bytes  # xxh3-128 of the tokens
    state: bytes = b""  # sampling state, in the engine's own encoding


class Accepted(msgspec.Struct, tag="accepted", array_like=True, frozen=True):
    """Every chunk has arrived and is verified, and the tokens agree: the target has committed."""

    ticket: str


class TransferRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The target refuses or aborts the transfer, and discards what it has received."""

    reason: str


Message = Open | Opened | KvChunk | Ending | Accepted | TransferRefused


def packed(tokens: Sequence[int]) -> bytes:
    """Encode token ids for the wire. Raise OverflowError for an id that is negative or has more than 32 bits."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpacked(tokens: bytes) -> list[int]:
    """Decode what `packed` has encoded. Raise ValueError for truncated data."""
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
    """Encode a message as a frame. Raise TransferFailed if it is too long."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise TransferFailed(f"a message of {len(body)} bytes is longer than {FRAME_BYTES_MAX}")
    return _HEADER.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


class TransferSocket:
    """A connected socket and the deadline (time.monotonic) for everything on it."""

    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        """Take ownership of this socket."""
        self._socket = connected
        self.deadline_s = deadline_s
        self.kind = "unix" if connected.family == socket.AF_UNIX else "tcp"
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message, payload: memoryview | None = None) -> None:
        """Send a message and its payload. Raise TransferFailed."""
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
        """Return the next message. Raise TransferFailed if it is damaged, the connection ended or the deadline has passed."""
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
            raise TransferFailed(f"not a message of a KV transfer: {error}") from error

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
        """Return whether data has arrived, or the peer has closed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def break_off(self, how: int = socket.SHUT_RDWR) -> None:
        """Make the call that waits on this socket fail, from any thread.

        After SHUT_RD, the reason can still be sent to the peer.
        """
        with contextlib.suppress(OSError):  # it is already broken
            self._socket.shutdown(how)

    def close(self, last: Message | None = None, patience_s: float = 0.5) -> None:
        """Close after a last message and after reading what the peer still sends: a reset would destroy that message."""
        try:
            if last is not None:
                self.deadline_s = time.monotonic() + patience_s
                self.send(last)
                self._socket.shutdown(socket.SHUT_WR)
                scratch = memoryview(bytearray(1 << 16))
                while True:
                    self.fill(scratch)
        except (OSError, TransferFailed):
            pass  # the peer has closed
        finally:
            self._socket.close()

    def _left_s(self) -> float:
        if (left_s := self.deadline_s - time.monotonic()) <= 0:
            raise TransferFailed("the deadline has passed")
        return left_s


def _broken(error: OSError) -> TransferFailed:
    late = isinstance(error, TimeoutError)
    return TransferFailed("the deadline has passed" if late else f"the connection broke: {error}")


class Remote(Protocol):
    """A region of another worker."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write, and return when everything has arrived. Raise TransferFailed."""
        ...

    def break_off(self) -> None:
        """Make a running write fail soon. Callable from any thread; does not wait."""
        ...

    def close(self) -> None:
        """Stop writing. May be called twice."""
        ...


class Transport(Protocol):
    """A way to write into other workers' regions without a socket. Thread-safe.

    On one host the source maps the region. A transport does the same over a network or into another device's memory. The target
    encodes an offer of its region, which the grant contains, and the source writes according to the offer. All messages and
    checksums are unchanged: the bytes are verified by the chunk's xxh3, not by the transport.
    """

    name: str

    def offer(self, memory: memoryview) -> bytes:
        """Let others write into this memory, and return the encoded offer. Raise TransferFailed."""
        ...

    def withdraw(self, memory: memoryview, quiet: bool) -> None:
        """Stop others from writing here. `quiet`: the source has already finished writing."""
        ...

    def remote(self, offer: bytes, deadline_s: float) -> Remote:
        """Return the region of this encoded offer. Raise TransferFailed."""
        ...
