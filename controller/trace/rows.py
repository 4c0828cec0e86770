"""Reads and writes trace files, which contain recorded requests, in two formats.

    Mooncake  one JSON object per line: timestamp (ms), input_length, output_length (tokens), hash_ids. There is one hash id for
              each block of the prompt; the last block may be partial. Prompts with equal first ids share that prefix. Other
              fields are ignored
    Azure     CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens; it has no information about shared prefixes

Files may be compressed with gzip. Rows are not kept, so a file of any length is read in bounded memory.
"""

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, cast

import msgspec

from events.errors import HoldfastError, UsageError

BLOCK_TOKENS = 512
LINE_MAX = 16 << 20  # maximum characters of a line
HASH_MAX = 2**64 - 1
TOKENS_MAX = 1 << 24  # longest prompt or answer; a larger number is an error, and might not fit into memory
MS_MAX = 1e15  # 30,000 years: rejects timestamps in nanoseconds
GZIP = b"\x1f\x8b"
_MOONCAKE = "a line is a JSON object of timestamp (ms), input_length, output_length and hash_ids"
_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE = f"a line is {_HEADER}"
_TOKENS = re.compile(r"\s*-?[0-9]{1,18}\s*", re.ASCII)


class BadTrace(HoldfastError):
    """The recorded trace cannot be used."""


class TraceRow(msgspec.Struct, gc=False):
    """One recorded request. `hash_ids` is empty if the trace has no information about shared prefixes."""

    timestamp: float  # ms since the beginning of the trace
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: list[int] = []


class TraceReader:
    """Yields the requests of a trace file, from its beginning, and counts the invalid lines.

    At an invalid line, raise BadTrace with the line's number; with `skip_bad`, skip and count the line instead. A request is
    invalid if its time is before that of the previous request. If `block_tokens` is given, a request is also invalid if the
    number of its hash ids does not fit the prompt's length. Raise BadTrace if the file cannot be read or has no valid request.
    """

    def __init__(
        self, path: Path, block_tokens: int | None = BLOCK_TOKENS, *, skip_bad: bool = False
    ) -> None:
        self.path = path
        self.skipped = 0
        self.first_error = ""
        self._block_tokens = block_tokens
        self._skip_bad = skip_bad
        self._line = self._lines = 0

    @property
    def rows(self) -> int:
        """Number of requests read."""
        return self._lines - self.skipped

    def __iter__(self) -> Iterator[TraceRow]:
        last = 0.0
        try:
            with opened(self.path) as lines:
                for self._line, row in _rows(lines):
                    self._lines += 1
                    fault = row if isinstance(row, str) else _fault(row, last, self._block_tokens)
                    if fault:
                        self.refuse(fault)
                    else:
                        last = cast(TraceRow, row).timestamp
                        yield cast(TraceRow, row)
        except (OSError, EOFError, zlib.error) as error:
            raise BadTrace(
                f"{self.path} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error
        if not self.rows:
            raise BadTrace(
                f"{self.path} holds no request" + (f": {self.first_error}" if self.skipped else "")
            )

    def refuse(self, fault: str) -> None:
        """Reject the request that was read last. Count its line as skipped if `skip_bad` is set, else raise BadTrace."""
        error = BadTrace(f"{self.path}, line {self._line}: {fault}")
        if not self._skip_bad:
            raise error
        self.skipped += 1
        self.first_error = self.first_error or str(error)


def bounded(tokens: int) -> int:
    """Return `tokens`, a scaled length, unchanged. Raise UsageError if it is above TOKENS_MAX."""
    if tokens > TOKENS_MAX:
        raise UsageError(
            f"a prompt or an answer would have {tokens:,} tokens, more than {TOKENS_MAX:,}: use a smaller factor"
        )
    return tokens


def encode(row: TraceRow) -> bytes:
    """Encode a request as a line of a Mooncake trace. Times are rounded to microseconds."""
    at = round(row.timestamp, 3)
    line: dict[str, object] = {
        "timestamp": int(at) if at == int(at) else at,  # whole milliseconds are written without a fraction
        "input_length": row.input_length,
        "output_length": row.output_length,
    }
    if row.hash_ids:
        line["hash_ids"] = row.hash_ids
    return msgspec.json.encode(line) + b"\n"


@contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """Open a text file for reading. A gzip file is decompressed."""
    with path.open("rb") as raw:
        plain = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == GZIP else raw
        with plain, io.TextIOWrapper(cast(IO[bytes], plain), encoding="utf-8-sig", errors="replace") as text:
            yield text


def _rows(lines: IO[str]) -> Iterator[tuple[int, TraceRow | str]]:
    """Yield the number of each line, with the line's request or a description of its error. Skip blank lines and the header."""
    azure = _Azure()
    is_azure = False
    for number, line in _numbered(lines):
        if len(line) >= LINE_MAX:
            yield number, f"it is longer than {LINE_MAX} characters"
        elif number == 1 and line.strip().upper() == _HEADER.upper():
            is_azure = True
        elif number == 1 and not line.isspace() and not line.lstrip().startswith("{"):
            yield number, f"it is neither the header {_HEADER} nor a request; {_MOONCAKE}"
        elif not line.isspace():
            yield number, azure.row(line) if is_azure else _mooncake(line)


def _numbered(lines: IO[str]) -> Iterator[tuple[int, str]]:
    """Yield each line with its number, truncated to LINE_MAX characters."""
    number = 0
    while line := lines.readline(LINE_MAX):
        number += 1
        yield number, line
        while len(line) == LINE_MAX and not line.endswith("\n"):
            line = lines.readline(LINE_MAX)


def _mooncake(line: str) -> TraceRow | str:
    try:
        row = _decode(line.rstrip())
    except msgspec.MsgspecError as error:
        return f"{error}; {_MOONCAKE}"
    if not row.hash_ids and row.input_length > 0 and '"hash_ids"' in line:
        return f"no hash_ids for {row.input_length} tokens"
    return row


_decode = msgspec.json.Decoder(TraceRow).decode


class _Azure:
    """Parses the lines of an Azure trace. Times are relative to the trace's first request."""

    def __init__(self) -> None:
        self._began: datetime | None = None

    def row(self, line: str) -> TraceRow | str:
        fields = line.strip().split(",")
        if len(fields) != 3:
            return f"{len(fields)} fields; {_AZURE}"
        try:
            when = datetime.fromisoformat(fields[0])
        except ValueError as error:
            return f"{error}; {_AZURE}"
        for field in fields[1:]:
            if not _TOKENS.fullmatch(field):
                return f"{field[:40]!r} is not a number of tokens; {_AZURE}"
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        self._began = self._began or when
        return TraceRow((when - self._began).total_seconds() * 1e3, int(fields[1]), int(fields[2]))


def _fault(row: TraceRow, last: float, block_tokens: int | None) -> str:
    """Return a description of a request's first error; "" if the request is valid.

    `last` is the time of the previous request in ms.
    """
    if not 0 <= row.timestamp <= MS_MAX:
        return f"a timestamp of {row.timestamp:g} ms, outside 0 to {MS_MAX:g}"
    if row.timestamp < last:
        return f"a timestamp of {row.timestamp:.0f} ms after one of {last:.0f}: times must not decrease"
    if row.input_length < 0 or row.output_length < 0:
        return f"lengths of {row.input_length} and {row.output_length} tokens: a length cannot be below 0"
    if max(row.input_length, row.output_length) > TOKENS_MAX:
        return f"lengths of {row.input_length} and {row.output_length} tokens: a length cannot be above {TOKENS_MAX}"
    if not row.hash_ids:
        return ""
    if min(row.hash_ids) < 0 or max(row.hash_ids) > HASH_MAX:
        return f"a hash id outside 0 to {HASH_MAX}"
    if block_tokens is not None and len(row.hash_ids) != (blocks := -(-row.input_length // block_tokens)):
        held = f"{row.input_length} tokens, that is {blocks} blocks of {block_tokens}"
        return f"{len(row.hash_ids)} hash_ids for {held} (--block-size)"
    return ""
