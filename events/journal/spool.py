"""The spool: a local file of unacknowledged facts, so that a killed process loses no fact.

A fact is written to the spool when it is observed, and marked when it is acknowledged, whether or not the broker is reachable.
So the file of a killed process holds all of its unacknowledged facts. The next process with the same directory sends the facts in
the file first. The file can also hold a few acknowledged facts, which are then sent twice. For two minutes the broker recognises
them as duplicates, by their ids. Later the readers recognise them, by their source numbers.

    record = kind (1 byte) · length (4) · CRC-32 of the body (4) · CRC-32 of these nine bytes (4) · body

The header has its own CRC, because a flipped bit in a length would otherwise look like a torn tail and hide all later records.
A torn tail is an incomplete last record after a crash, and is not damage. Every other failed check is counted. The readable
records are used, and a copy of the file is stored for an operator to inspect.

There is no fsync per fact, because the kernel still has the data after the process is killed. While the broker is unreachable,
`sync` is called once a second. So a power failure loses at most the unacknowledged facts of the last second.
"""

import fcntl
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from events.errors import HoldfastError

BYTES_MAX = 64 * 1024 * 1024  # limit of the spool of one process; about 100,000 facts
# a new file is begun above this size; a full file is removed when all of its facts are marked
SEGMENT_BYTES = 2 * 1024 * 1024
RECORD_BYTES_MAX = 8 * 1024 * 1024
SUFFIX = ".spool"  # <instance>.<number of the segment>.spool

FACT, ACKED = 1, 2
_HEAD = struct.Struct("<BII")
_CRC = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_HEADER_BYTES = _HEAD.size + _CRC.size

log = structlog.get_logger(__name__)


class OutboxMessage(msgspec.Struct, array_like=True):
    """One fact as it will be published. The spool stores the same subject, headers and body as the published message has."""

    number: int  # the fact's number, counted by its source
    subject: str
    headers: dict[str, str]
    body: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(OutboxMessage).decode


@dataclass
class SpoolContent:
    """The part of one spool file that could be read."""

    messages: list[OutboxMessage] = field(default_factory=list)
    acked: int = 0  # all facts up to this number are acknowledged
    damaged: int = 0  # number of positions that failed a check
    torn: bool = False  # the last record is incomplete, because the process died while writing it


def scan(data: bytes) -> Iterator[tuple[int, bytes] | None]:
    """Yield the kind and the body of each record, or None for each damaged part. Raise EOFError if the last record is
    incomplete."""
    offset = 0
    while offset < len(data):
        header = data[offset : offset + _HEADER_BYTES]
        if len(header) < _HEADER_BYTES:
            raise EOFError
        if not _header_holds(header):
            yield None
            offset = _next_header(data, offset + 1)
            continue
        kind, length, crc = _HEAD.unpack_from(header)
        body = data[offset + _HEADER_BYTES : offset + _HEADER_BYTES + length]
        if len(body) < length:
            raise EOFError
        yield (kind, body) if zlib.crc32(body) == crc else None
        offset += _HEADER_BYTES + length


def _header_holds(header: bytes) -> bool:
    (crc,) = _CRC.unpack_from(header, _HEAD.size)
    return bool(zlib.crc32(header[: _HEAD.size]) == crc)


def _next_header(data: bytes, offset: int) -> int:
    """Return the offset of the next valid record header, or the length of `data` if no valid header follows."""
    while offset + _HEADER_BYTES <= len(data):
        if data[offset] in (FACT, ACKED) and _header_holds(data[offset : offset + _HEADER_BYTES]):
            return offset
        offset += 1
    return len(data)


def read(data: bytes) -> SpoolContent:
    """Parse the bytes of a spool file. Damaged parts are counted and never raise."""
    left = SpoolContent()
    try:
        for record in scan(data):
            if record is None:
                left.damaged += 1
            elif record[0] == ACKED:
                left.acked = max(left.acked, _NUMBER.unpack(record[1])[0])
            else:
                left.messages.append(_decode(record[1]))
    except EOFError:
        left.torn = True
    except (msgspec.MsgspecError, struct.error):
        left.damaged += 1
    return left


class SpoolUnusable(HoldfastError):
    """The spool's folder cannot be written. Choose another data directory with --data."""


@dataclass
class _Segment:
    path: Path
    file: int
    bytes: int = 0
    last: int = 0  # number of the segment's last fact
    unsynced: bool = False


class Spool:
    """The spool files of this process, and those that earlier processes left in the same directory.

    Acknowledgements arrive in order, so one stored number suffices: all facts up to that number are acknowledged.
    """

    def __init__(
        self, directory: Path, life: str, *, bytes_max: int = BYTES_MAX, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """Create the first spool file. `life` is the id of this process instance. Raise SpoolUnusable if the file cannot be
        created."""
        self._segment_bytes = segment_bytes
        self.directory = directory
        self.life = life
        self.bytes_max = bytes_max
        self.failures = 0  # number of writes that the file system refused
        self._count = 0
        self._segments: deque[_Segment] = deque()
        self._earlier: list[tuple[Path, int]] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._grow()
        except OSError as error:
            raise SpoolUnusable(f"{directory}: {error.strerror}. {SpoolUnusable.__doc__}") from error

    def _grow(self) -> None:
        path = self.directory / f"{self.life}.{self._count:08d}{SUFFIX}"
        self._count += 1
        file = _locked(path)
        assert file is not None, "the name of a life is used once"
        self._segments.append(_Segment(path, file))

    def take_over(self) -> list[OutboxMessage]:
        """Return the unacknowledged facts that killed processes left, the oldest first. The files stay until `forget_earlier`
        removes them."""
        lives: dict[str, list[Path]] = {}
        for path in sorted(self.directory.glob(f"*{SUFFIX}")):
            life = path.name.split(".")[0]
            if life != self.life:
                lives.setdefault(life, []).append(path)
        return [message for paths in lives.values() for message in self._inherit(paths)]

    def _inherit(self, paths: list[Path]) -> list[OutboxMessage]:
        messages: list[OutboxMessage] = []
        acked = 0
        for path in paths:
            file = _locked(path)
            if file is None:
                continue  # the process that writes this file is still running
            left = read(path.read_bytes())
            self._report(path, left)
            messages += left.messages
            acked = max(acked, left.acked)
            self._earlier.append((path, file))
        return [message for message in messages if message.number > acked]

    def _report(self, path: Path, left: SpoolContent) -> None:
        if left.damaged:
            aside = path.with_suffix(".damaged")
            aside.write_bytes(path.read_bytes())
            log.error("spool_damaged", file=str(aside), places=left.damaged, readable=len(left.messages))
        if left.messages:
            log.info("spool_taken_over", file=path.name, facts=len(left.messages), torn=left.torn)

    def forget_earlier(self) -> None:
        """Remove the files of earlier processes, because all of their facts have been acknowledged or dropped."""
        for path, file in self._earlier:
            path.unlink(missing_ok=True)
            os.close(file)
        self._earlier.clear()

    def put(self, message: OutboxMessage) -> bool:
        """Write one fact. Return False if the spool has no room for the fact, or if the file system refused the write."""
        body = _encode(message)
        held = sum(segment.bytes for segment in self._segments)
        if held + len(body) > self.bytes_max or len(body) > RECORD_BYTES_MAX:
            return False
        try:
            if self._segments[-1].bytes > self._segment_bytes:
                self._grow()
        except OSError as error:
            self._failed(self.directory, error)
            return False
        if not self._write(FACT, body):
            return False
        self._segments[-1].last = message.number
        return True

    def mark(self, number: int, *, empty: bool) -> None:
        """Mark all facts up to `number` as acknowledged. If `empty` is set, all facts are acknowledged, so a large file is
        truncated."""
        newest = self._segments[-1]
        try:
            while len(self._segments) > 1 and self._segments[0].last <= number:
                self._drop(self._segments.popleft())
            if empty and newest.bytes > min(self._segment_bytes // 2, self.bytes_max // 4):
                os.ftruncate(newest.file, 0)
                newest.bytes = 0
                return
        except OSError as error:  # for example because the disk has become read-only
            self._failed(newest.path, error)
        self._write(ACKED, _NUMBER.pack(number))

    def sync(self) -> None:
        """Sync the written data of all files to disk."""
        for segment in list(self._segments):
            if not segment.unsynced:
                continue
            segment.unsynced = False
            try:
                os.fdatasync(segment.file)
            except OSError as error:
                # called in a thread, so the file may have been removed meanwhile, which does no harm
                self._failed(segment.path, error)

    def close(self, *, empty: bool) -> None:
        """Close the files. If `empty` is set, also remove this process's files, because all of their facts are acknowledged."""
        for segment in self._segments:
            if empty:
                self._drop(segment)
            else:
                os.close(segment.file)
        self._segments.clear()
        for _, file in self._earlier:
            os.close(file)
        self._earlier.clear()

    def _drop(self, segment: _Segment) -> None:
        segment.path.unlink(missing_ok=True)
        os.close(segment.file)

    def _write(self, kind: int, body: bytes) -> bool:
        segment = self._segments[-1]
        head = _HEAD.pack(kind, len(body), zlib.crc32(body))
        record = b"".join((head, _CRC.pack(zlib.crc32(head)), body))
        try:
            written = os.write(segment.file, record)
            # the disk is full: remove the fragment, because it would hide later records
            if written < len(record):
                os.ftruncate(segment.file, segment.bytes)
                raise OSError("short write")
        except OSError as error:
            self._failed(segment.path, error)
            return False
        segment.bytes += len(record)
        segment.unsynced = True
        return True

    def _failed(self, path: Path, error: OSError) -> None:
        self.failures += 1
        if self.failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …, because a full disk refuses every fact
            log.error("spool_write_failed", file=str(path), error=str(error), times=self.failures)


def _locked(path: Path) -> int | None:
    """Open and lock a spool file for this process alone. Return the file descriptor, or None if another process has the
    lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file
