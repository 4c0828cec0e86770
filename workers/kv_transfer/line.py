"""One connection of a transfer: frames and bytes over a blocking socket, all of it before one deadline.

A frame is four bytes of length and eight of xxh3-64 (little endian) of the msgpack value that follows, so that a
frame flipped in any byte is refused, and one that was cut is waited for until the deadline.
"""

import contextlib
import select
import socket
import struct
import time

import msgspec
import xxhash

from workers.kv_transfer.errors import TransferFailed
from workers.kv_transfer.messages import (
    Accepted,
    Ending,
    KvChunk,
    Message,
    Open,
    Opened,
    TransferRefused,
)

FRAME_BYTES_MAX = 8 << 20  # the ending has all tokens of the request and the state
_HEADER = struct.Struct("<IQ")
_encoder = msgspec.msgpack.Encoder()
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
        """Wake whoever waits on this line, from any thread: it fails there. After SHUT_RD it can still be told why."""
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
            pass  # nobody listens
        finally:
            self._socket.close()

    def _left_s(self) -> float:
        if (left_s := self.deadline_s - time.monotonic()) <= 0:
            raise TransferFailed("the time is up")
        return left_s


def _broken(error: OSError) -> TransferFailed:
    late = isinstance(error, TimeoutError)
    return TransferFailed("the time is up" if late else f"the connection broke: {error}")
