"""Limits the cost of reading and tokenizing a request before it is known to be valid.

    bytes ──▶ decompressed, within limits per body and for all bodies ──▶ counted (`BodyScan`) ──▶ parsed ──▶ tokenized

Each limit is a setting, and each refusal is counted by the name of its limit.
"""

import asyncio
import os
import sys
import zlib
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import structlog
from aiohttp import StreamReader, web

from controller.frontend.errors import ApiError, invalid, unavailable
from controller.frontend.metrics import BoundMetrics
from controller.frontend.openai.parse_process import HEAD, NAMES, SIZE, outcome
from controller.frontend.openai.request_kinds import parse_body
from controller.frontend.openai.request_parser import bad_json
from controller.frontend.openai.text.long_texts import RETRY_AFTER_S, LongTexts
from controller.frontend.settings import AdmissionSettings, FrontendSettings

MIB = 2**20
YIELD_BYTES = 2**16  # bytes scanned before other tasks run, which takes a millisecond
# bytes decompressed, or written to a process, in one step; other threads and tasks can run between steps
PIECE_BYTES = 2**18
RATIO_MAX = 1032  # maximum compression ratio of deflate: 258 bytes in two bits
SMALL_BYTES = 2**18  # size of output that takes a millisecond to decompress
_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
UNSCANNED_BYTES = 2**14  # a smaller body takes at most a millisecond to parse, whatever its content
SLICE_BYTES = 2**14  # maximum bytes per call of `feed`, which then takes less than a millisecond
# A body within all of these limits is parsed on the event loop, which takes at most 5 ms.
CHEAP_BYTES = 2**19
CHEAP_TEXTS = 2**12
CHEAP_NESTED = 2**10
CHEAP_VALUES = 2**15
HUGE_BYTES = 4 * MIB  # size of a body from which a separate process parses it
COMMAND = (sys.executable, "-m", "controller.frontend.openai.parse_process")

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class BodyScan:
    """Counts the structural elements of a JSON body, slice by slice, before any object is built.

    bytes ──▶ strings counted and removed ──▶ names, values, lists and objects counted ──▶ within the limits, or refused

    A JSON decoder cannot be interrupted and takes up to a microsecond per value. So a body is refused as soon as a
    count exceeds its limit, usually long before the whole body has arrived. The scanner does not validate; the parser
    rejects invalid JSON. The default limits permit 10,000 messages of one part each.
    """

    _limits: AdmissionSettings
    # a backslash at the end of a slice, which escapes the first character of the next slice
    _backslash: bytes = b""
    _in_text: bool = False
    _quotes: int = 0
    size: int = 0
    names: int = 0
    nested: int = 0
    values: int = 0

    @property
    def cheap(self) -> bool:
        """Whether the body can be parsed on the event loop without blocking it for long."""
        few = self._quotes <= 2 * CHEAP_TEXTS and self.nested <= CHEAP_NESTED and self.values <= CHEAP_VALUES
        return few and self.size <= CHEAP_BYTES

    def feed(self, piece: bytes) -> str:
        """Count the elements in a slice of at most SLICE_BYTES.

        Return the exceeded limit as a phrase (`1000 names`), or an empty string if no limit is exceeded.
        """
        limits = self._limits
        self.size += len(piece)
        if self._backslash or b"\\" in piece:
            piece = (self._backslash + piece).replace(b"\\\\", b"").replace(b'\\"', b"")
            self._backslash = b"\\" if piece.endswith(b"\\") else b""
            piece = piece.removesuffix(b"\\")
        if quotes := piece.count(b'"'):
            self._quotes += quotes
            if self._quotes > 2 * limits.body_texts_max:
                return f"{limits.body_texts_max} texts and names"
            parts = piece.split(b'"')
            piece = b"".join(parts[self._in_text :: 2])  # the text outside strings
            self._in_text ^= len(parts) % 2 == 0
        elif self._in_text:
            return ""
        self.names += piece.count(b":")
        self.nested += piece.count(b"[") + piece.count(b"{")
        self.values += piece.count(b",")
        for count, most, what in (
            (self.names, limits.body_names_max, "names"),
            (self.nested, limits.body_lists_max, "lists and objects"),
            (self.values, limits.body_values_max, "values"),
        ):
            if count > most:
                return f"{most} {what}"
        return ""


class ReceivedBody(NamedTuple):
    """A decompressed body, with the counts of its scan. They are zero if the body was not scanned while it arrived."""

    body: bytes
    scan: BodyScan | None  # None: not scanned, because the body is small


class DecompressedTooLarge(Exception):
    """The decompressed body exceeds its limit."""


class Intake:
    """Receives, decompresses and parses the request bodies of one frontend, within limits per body and for all bodies."""

    def __init__(self, settings: FrontendSettings, bounds: BoundMetrics | None = None) -> None:
        """Start without requests. `bounds` counts each refusal; if it is None, the counts are not exposed."""
        self.bounds = bounds or BoundMetrics()
        self.long_texts = LongTexts(settings.tokenizing, self.bounds)
        limits = self._limits = settings.admission
        self._parsers = BodyParsers(limits, self.bounds)
        self.body_bytes = 0  # bytes of the bodies that are being received

    async def parsed(self, kind: str, given: bytes | web.BaseRequest) -> Any:
        """Return the parsed body of a request. `kind` selects the parser (`parse_body`).

        Raise ApiError: 400 if the body is invalid or has too many values, 408 if it has not arrived after `body_s`,
        413 if it is larger than the request's `client_max_size`, 503 if another limit is exceeded.
        """
        return await self.parse(kind, await self.receive(given))

    async def receive(self, given: bytes | web.BaseRequest, *, json: bool = True) -> ReceivedBody:
        """Return the body of a request. `json` states that its values are counted while it arrives.

        Raise ApiError as `parsed` does, except for invalid values.
        """
        scan = BodyScan(self._limits)
        if isinstance(given, bytes):
            return ReceivedBody(given, scan)
        return ReceivedBody(await self._received(given, scan if json else None), scan)

    async def parse(self, kind: str, received: ReceivedBody) -> Any:
        """Return a parsed body. `kind` selects the parser (`parse_body`). Raise ApiError as `parsed` does."""
        body, scan = received.body, received.scan or BodyScan(self._limits)
        # the body was not scanned while it arrived
        if scan.size != len(body) and len(body) > UNSCANNED_BYTES:
            await self.scan(scan, body)
        return parse_body(kind, body) if scan.cheap else await self._parsers.parse(kind, body)

    async def close(self) -> None:
        """Stop the processes that parse bodies."""
        await self._parsers.close()

    async def scan(self, scan: BodyScan, piece: bytes) -> None:
        """Count the elements in a piece of a body. Raise ApiError (400) if the body has too many elements."""
        for at in range(0, len(piece), SLICE_BYTES):
            if too_much := scan.feed(piece[at : at + SLICE_BYTES]):
                self.bounds.count("body_values")
                raise invalid(f"a body may have at most {too_much}")
            if at and at % YIELD_BYTES == 0:
                await asyncio.sleep(0)

    async def _received(self, request: web.BaseRequest, scan: BodyScan | None) -> bytes:
        """Return a request's decompressed body. `scan` scans an uncompressed body that arrives in pieces meanwhile."""
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # otherwise curl waits a second
        most = request.client_max_size
        if (request.content_length or 0) > most:
            raise self._too_large()
        try:
            encoding = request.headers.get("Content-Encoding", "").lower()
            plain = encoding in ("", "identity")
            if request.content.is_eof():
                # the common case: the body arrived together with its head
                body = request.content.read_nowait()
            else:
                async with asyncio.timeout(self._limits.body_s):
                    body = await self._gathered(request.content, most, scan if plain else None)
            return body if plain else await self._inflated(body, encoding, most)
        except web.RequestPayloadError as error:  # truncated, or with invalid chunks
            raise bad_json(" ".join(str(error).split())) from error
        except ValueError as error:
            raise bad_json(str(error)) from error
        except TimeoutError as error:
            self.bounds.count("body_wait")
            why = f"the body did not arrive within {self._limits.body_s:g} s"
            raise ApiError(408, why, code="body_timeout") from error

    async def _inflated(self, body: bytes, encoding: str, most: int) -> bytes:
        """Decompress a body to at most `most` bytes, in a thread if it is large.

        Raise ValueError if the body is invalid, or ApiError if it exceeds a limit.
        """
        with suppress(DecompressedTooLarge):
            return inflated(body, encoding, min(most, SMALL_BYTES))
        try:
            return await self.long_texts.inflate(len(body), partial(inflated, body, encoding, most))
        except DecompressedTooLarge as error:
            raise self._too_large() from error

    async def _gathered(self, content: StreamReader, most: int, scan: BodyScan | None) -> bytes:
        """Receive a body of at most `most` bytes that is still arriving, and return it.

        `scan` checks each piece at once, so that an excessive body is refused early. Raise ApiError if a limit is
        exceeded.
        """
        gathered = bytearray()  # not copied to bytes: that would take 20 ms for 45 MB
        size, all_most = 0, self._limits.bodies_mb_max * MIB
        try:
            while piece := await content.readany():
                if size + len(piece) > most:
                    raise self._too_large()
                if self.body_bytes > size and self.body_bytes + len(piece) > all_most:
                    self.bounds.count("bodies_bytes")
                    why = f"{self.body_bytes // MIB} MB of requests' bodies are being read"
                    raise unavailable(why, "queue_full", RETRY_AFTER_S)
                size += len(piece)
                self.body_bytes += len(piece)
                gathered += piece
                if scan is not None:
                    await self.scan(scan, piece)
        finally:
            self.body_bytes -= size
        return cast(bytes, gathered)  # readers accept a bytearray as bytes

    def _too_large(self) -> ApiError:
        self.bounds.count("body_bytes")
        why = f"the body is larger than {self._limits.body_mb_max} MB"
        return ApiError(413, why, code="body_too_large")


def inflated(data: bytes, encoding: str, most: int) -> bytes:
    """Decompress a body to at most `most` bytes: gzip, or deflate with or without zlib's header.

    Raise DecompressedTooLarge if the result is larger. Raise ValueError if the data is invalid or the encoding is
    unknown.
    """
    if encoding not in _WINDOW:
        why = f"unsupported encoding {encoding[:40]!r}: send the body uncompressed, or use gzip or deflate"
        raise ValueError(why)
    bare = encoding == "deflate" and data[:1] and data[0] & 0xF != 8  # many clients omit the zlib header
    window = -zlib.MAX_WBITS if bare else _WINDOW[encoding]
    if window > zlib.MAX_WBITS and most < int.from_bytes(data[-4:], "little") <= RATIO_MAX * len(data):
        # gzip data ends with its decompressed size (RFC 1952 §2.3.1), which is trusted if the compression ratio is
        # possible
        raise DecompressedTooLarge
    found: list[bytes] = []
    left, stream = most, zlib.decompressobj(window)
    try:
        while data:
            piece = stream.decompress(data, PIECE_BYTES)
            found.append(piece)
            left -= len(piece)
            if left < 0:
                raise DecompressedTooLarge
            data = stream.unused_data if stream.eof else stream.unconsumed_tail
            if stream.eof and data:
                stream = zlib.decompressobj(window)  # gzip allows several members in sequence
        found.append(stream.flush())
    except zlib.error as error:
        raise ValueError(f"invalid {encoding} data: {error}") from error
    if found and not stream.eof:
        raise ValueError(f"the {encoding} data is truncated")
    return b"".join(found)


class BodyParsers:
    """Parses request bodies that are too large for the event loop, in processes that can be killed.

    up to 4 MiB ──▶ one process
    more ─────────▶ another process, so that long prompts do not wait for huge bodies

    A thread would not help, because the decoder holds the interpreter lock until it has finished. Each process is
    started for the first body that needs it. After it was killed or has failed, it is started again.
    """

    def __init__(self, settings: AdmissionSettings, bounds: BoundMetrics) -> None:
        """Start without child processes. `bounds` counts each refused body."""
        self._settings = settings
        self._bounds = bounds
        self._processes = (_ParserProcess(), _ParserProcess())
        self.waiting_bytes = 0  # bytes of bodies that are being parsed or wait for a process

    async def parse(self, name: str, body: bytes) -> Any:
        """Return the result of the parser with this name for a body.

        Raise ApiError: 400 if the body is invalid, 503 if a limit is exceeded.
        """
        most, size = self._settings.bodies_mb_max * MIB, len(body)
        if self.waiting_bytes and self.waiting_bytes + size > most:
            why = f"{self.waiting_bytes // MIB} MB of requests' bodies are waiting to be parsed"
            raise self._refusal("queue_full", why)
        self.waiting_bytes += size
        running = asyncio.create_task(self._parse(self._processes[size > HUGE_BYTES], name, body))
        running.add_done_callback(partial(self._parsed, size))
        # A disconnected client does not stop the parser: starting another process costs more than finishing.
        return outcome(name, await asyncio.shield(running))

    def _parsed(self, size: int, running: "asyncio.Task[bytes]") -> None:
        self.waiting_bytes -= size
        if not running.cancelled():
            running.exception()  # mark as retrieved, even if the client has disconnected

    async def _parse(self, process: "_ParserProcess", name: str, body: bytes) -> bytes:
        limit_s = self._settings.body_parse_s
        try:
            async with asyncio.timeout(limit_s), process.lock:
                for _ in range(2):  # the process may have died before this body
                    try:
                        return await process.parse(name, body)
                    except (OSError, RuntimeError, asyncio.IncompleteReadError) as error:
                        log.warning("body_parser_failed", why=str(error) or type(error).__name__)
        except TimeoutError as error:
            raise self._refusal("queue_timeout", f"the body was not parsed within {limit_s:g} s") from error
        raise self._refusal("queue_full", "the process that parses bodies has ended")

    def _refusal(self, code: str, why: str) -> ApiError:
        self._bounds.count("body_parse")
        return unavailable(why, code, RETRY_AFTER_S)

    async def close(self) -> None:
        """Kill both child processes."""
        for process in self._processes:
            await process.end()


class _ParserProcess:
    """A child process that parses one body at a time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._process: Process | None = None

    async def parse(self, name: str, body: bytes) -> bytes:
        """Return the encoded outcome of parsing a body. The process is killed if the caller is cancelled.

        Raise OSError or IncompleteReadError if the process has ended, or RuntimeError if uvloop has already closed
        the pipe to the process.
        """
        try:
            process = await self._running()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(HEAD.pack(len(body), NAMES.index(name)))
            view = memoryview(body)
            for at in range(0, len(body), PIECE_BYTES):
                process.stdin.write(bytes(view[at : at + PIECE_BYTES]))
                await process.stdin.drain()
            (size,) = SIZE.unpack(await process.stdout.readexactly(SIZE.size))
            return await process.stdout.readexactly(size)
        # the process is killed, so that a late outcome is not read as the outcome of the next body
        except BaseException:
            await self.end()
            raise

    async def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            own = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
            self._process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=PIPE, stdout=PIPE, env=own, limit=PIECE_BYTES
            )
        return self._process

    async def end(self) -> None:
        """Kill the process if it is running, and wait until it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):  # the process has already ended
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
