"""The messages between source and target of a KV transfer, and the grant that the target issues first.

    source ── Open ──▶ target                    ── Opened ──▶ source       if both know the fleet's key
    source ── Chunk, Chunk, … ──▶ target         each followed by its bytes, except with shared memory
    source ── Ending ──▶ target                  ── Accepted or Refused ──▶ source

Refused may arrive at any time and ends the transfer. A connection that closes before Accepted ends the transfer too.

Each message is sent as a frame: the body's length (4 bytes), the body's xxh3-64 checksum (8 bytes) and the body, a msgpack
value. Both numbers are little endian. A frame with a flipped bit is refused, and the rest of a truncated frame is awaited until
the deadline. `TransferSocket` sends and receives frames over a blocking socket, with one deadline for all of them.
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
Words = bytes  # an alias of `bytes`, for structs that have a field with the name `bytes`
STATE_BYTES_MAX = 1 << 20
FRAME_BYTES_MAX = 8 << 20  # enough for an `Ending`, which carries all token ids of the request and its state
_HEADER = struct.Struct("<IQ")
_encoder = msgspec.msgpack.Encoder()


class TransferFailed(HoldfastError):
    """The KV cache could not be transferred. The stream continues by re-prefill, or at its source."""


class RegionTaken(HoldfastError):
    """Another live process serves this instance's KV regions. Every instance needs its own name."""


class Description(msgspec.Struct, array_like=True, frozen=True):
    """The format of the KV blocks of one shard. Two workers may exchange blocks only if all fields are equal."""

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
        """Return a text with the first field that differs from `other`; empty if all fields are equal."""
        for name in self.__struct_fields__:
            if (ours := getattr(self, name)) != (theirs := getattr(other, name)):
                return f"{name} is {theirs!r} there and {ours!r} here"
        return ""

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks that hold the KV of `tokens` tokens. The last block may be partly filled."""
        return -(-tokens // self.block_size)


class TransferAddress(msgspec.Struct, array_like=True, frozen=True):
    """The addresses on which a target listens: a Unix socket (`path`) for sources on its host, and TCP for others."""

    host: str
    port: int
    path: str = ""


class Grant(msgspec.Struct, array_like=True, frozen=True):
    """The target's permission for a source to write one shard's KV blocks into a reserved region of memory."""

    ticket: str
    endpoint: TransferAddress
    bytes: int  # size of the region that the source may fill
    seconds: float  # time until the reservation ends
    description: Description  # the format of the blocks that the target accepts
    region: str = ""  # path of the region's file on the target's host; empty: plain memory
    # the first block of the sequence that the source sends; the target has the earlier blocks in its cache
    first_block: int = 0
    offer: Words = b""  # the `Transport`'s encoded offer of the region; empty: no transport can write into it


class Open(msgspec.Struct, tag="open", array_like=True, frozen=True):
    """The source's first message, which opens its reservation.

    If `shared` is true, the source writes into the region directly, and no bytes follow a chunk's message on the socket.
    """

    ticket: str
    description: Description
    shared: bool
    version: int = VERSION
    nonce: bytes = b""
    # proves that the source knows the fleet's key; covers the single-use ticket and the nonce
    proof: bytes = b""


class Opened(msgspec.Struct, tag="opened", array_like=True, frozen=True):
    """The target's answer to `Open`. It proves that the target knows the fleet's key, and is not sent without a key."""

    proof: bytes


class KvChunk(msgspec.Struct, tag="chunk", array_like=True, frozen=True):
    """One chunk of KV blocks, which belongs at `offset` of the region and has the checksum `xxh3` (xxh3-64).

    The chunk's content, of `bytes` bytes, follows on the socket, unless the source has written it into the region directly.
    """

    ticket: str
    number: int
    offset: int
    bytes: int
    xxh3: int


class Ending(msgspec.Struct, tag="end", array_like=True, frozen=True):
    """The source's last message, sent after it has stopped the stream and sent all blocks.

    The blocks hold the KV of the first `computed` of the request's `count` tokens. `chunks` is the number of chunks sent.
    """

    ticket: str
    chunks: int
    computed: int
    count: int
    tokens: bytes  # token ids of prompt and answer, 4 bytes each, little endian
    digest: bytes  # xxh3-128 of `tokens`
    state: bytes = b""  # the request's state, as encoded by `migration.state`


class Accepted(msgspec.Struct, tag="accepted", array_like=True, frozen=True):
    """The target's last message, after its commit: all chunks are verified, and the tokens match the reservation."""

    ticket: str


class TransferRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The target refuses or aborts the transfer for `reason`, and discards the bytes that it has received."""

    reason: str


Message = Open | Opened | KvChunk | Ending | Accepted | TransferRefused


def packed(tokens: Sequence[int]) -> bytes:
    """Encode token ids for the wire. Raise OverflowError for an id that is negative or has more than 32 bits."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpacked(tokens: bytes) -> list[int]:
    """Decode token ids that `packed` has encoded. Raise ValueError for truncated data."""
    ids = array("I")
    ids.frombytes(tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def digest(packed_tokens: bytes) -> bytes:
    """Return the xxh3-128 digest of packed token ids, by which two workers check that a request's tokens are equal."""
    return xxhash.xxh3_128_digest(packed_tokens)


_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Open | Opened | KvChunk | Ending | Accepted | TransferRefused
)


def framed(message: Message) -> bytes:
    """Encode a message as a frame. Raise TransferFailed if the message has more than 8 MiB (FRAME_BYTES_MAX)."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise TransferFailed(f"a message of {len(body)} bytes is longer than {FRAME_BYTES_MAX}")
    return _HEADER.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


class TransferSocket:
    """Sends and receives messages over a connected socket, until a deadline (time.monotonic)."""

    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        """Take ownership of the socket `connected`, which `close` closes."""
        self._socket = connected
        self.deadline_s = deadline_s
        self.kind = "unix" if connected.family == socket.AF_UNIX else "tcp"
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message, payload: memoryview | None = None) -> None:
        """Send a message and its payload. Raise TransferFailed if the connection breaks or the deadline passes first."""
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
        """Return the next message.

        Raise TransferFailed if the message is damaged, if the connection has ended, or if the deadline has passed.
        """
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
        """Receive bytes until `view` is full. Raise TransferFailed if the connection ends or the deadline passes first."""
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
        """Return whether data has arrived or the peer has closed the connection."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def break_off(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut the socket down, so that a call that waits on it fails. May be called from any thread.

        If `how` is SHUT_RD, this process can still send a last message to the peer.
        """
        with contextlib.suppress(OSError):  # the connection may have ended already
            self._socket.shutdown(how)

    def close(self, last: Message | None = None, patience_s: float = 0.5) -> None:
        """Send the message `last`, if any, and then close the socket.

        After sending `last`, read and discard what the peer still sends, for at most `patience_s` seconds in all. If unread
        data were left at the close, the kernel would reset the connection, and the peer might lose the last message.
        """
        try:
            if last is not None:
                self.deadline_s = time.monotonic() + patience_s
                self.send(last)
                self._socket.shutdown(socket.SHUT_WR)
                scratch = memoryview(bytearray(1 << 16))
                while True:
                    self.fill(scratch)
        except (OSError, TransferFailed):
            pass  # the peer has closed the connection, or the time is up
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
    """Write access to a memory region of another worker."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at this offset of the region, and return when all of `data` has arrived.

        Raise TransferFailed if the data cannot arrive.
        """

    def break_off(self) -> None:
        """Make a running write fail soon, and return at once. May be called from any thread."""

    def close(self) -> None:
        """End the write access. May be called more than once."""


class Transport(Protocol):
    """The interface of a transport, which writes KV blocks into other workers' regions without a socket.

    A transport is thread-safe. It writes over a network or into the memory of another device. The target's grant contains an
    encoded offer of the region, and the source writes by that offer. A transport does not change the messages: the target still
    verifies each chunk by its xxh3 checksum. Without a transport, a source on the target's host maps the region's file.
    """

    name: str

    def offer(self, memory: memoryview) -> bytes:
        """Allow sources to write into `memory`, and return the encoded offer. Raise TransferFailed if the transport fails."""

    def withdraw(self, memory: memoryview, quiet: bool) -> None:
        """End the offer of `memory`. `quiet` is true if the source has finished writing, so that no late bytes can arrive."""

    def remote(self, offer: bytes, deadline_s: float) -> Remote:
        """Return write access to the region of this encoded offer, until `deadline_s` (time.monotonic).

        Raise TransferFailed if the offer is invalid or the region cannot be reached.
        """
