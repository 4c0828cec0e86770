"""What a client's request may cost before it is known to be worth anything: its body, and the reading of its texts.

    bytes ──▶ no more than a body may have, inflated; no more of all bodies at once ──▶ counted (body_scan.py) ──▶ parsed

Each bound is a setting, and each refusal is counted by its name.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

from aiohttp import StreamReader, web

from controller.frontend.errors import ApiError, invalid, unavailable
from controller.frontend.openai.body_parsers import BodyParsers
from controller.frontend.openai.body_scan import SLICE_BYTES, UNSCANNED_BYTES, BodyLimits, BodyScan
from controller.frontend.openai.decompression import SMALL_BYTES, InflatesTooFar, inflated
from controller.frontend.openai.long_texts import RETRY_AFTER_S, LongTexts
from controller.frontend.openai.readers import READERS
from controller.frontend.openai.request_parser import bad_json
from controller.frontend.settings import FrontendSettings

MIB = 2**20
YIELD_BYTES = 2**16  # scanned before other tasks have their turn: a millisecond


class Intake:
    """The bounds of one frontend, and what has been taken of them."""

    def __init__(
        self, settings: FrontendSettings, refused: Callable[[str], object] = lambda bound: None
    ) -> None:
        """`refused` is told of each refusal, by the bound."""
        self.refused = refused
        self.long_texts = LongTexts(settings.tokenizing, refused)
        limits = self._limits = settings.admission
        self._parsers = BodyParsers(limits, refused)
        self._most = BodyLimits(
            limits.body_names_max, limits.body_lists_max, limits.body_texts_max, limits.body_values_max
        )
        self.body_bytes = 0  # of bodies that are being read

    async def parsed(self, parser: str, given: bytes | web.BaseRequest) -> Any:
        """Return what a request's body asks for, as the parser of this name (readers.py) understands it. Raise ApiError: 400 for
        an invalid body, or what `body` raises."""
        if isinstance(given, bytes):
            body, cheap = given, len(given) <= UNSCANNED_BYTES or await self.scanned(given)
        else:
            body, cheap = await self._received(given)
        return READERS[parser][0](body) if cheap else await self._parsers.parse(parser, body)

    async def body(self, request: web.BaseRequest) -> bytes:
        """Return a request's body, inflated. Raise ApiError: 400 for a broken one, or one of too many values, 408 after `body_s`,
        413 above the request's `client_max_size`, 503 while all bodies together have `bodies_mb_max`."""
        return (await self._received(request))[0]

    async def close(self) -> None:
        """End the processes that parse bodies."""
        await self._parsers.close()

    async def scanned(self, body: bytes) -> bool:
        """Say whether a body can be parsed on the event loop. Raise ApiError (400) if it has too much of anything."""
        if len(body) <= UNSCANNED_BYTES:
            return True
        scan = BodyScan(self._most)
        await self._scan(scan, body)
        return scan.cheap

    async def _scan(self, scan: BodyScan, piece: bytes) -> None:
        for at in range(0, len(piece), SLICE_BYTES):
            if too_much := scan.feed(piece[at : at + SLICE_BYTES]):
                self.refused("body_values")
                raise invalid(f"a body may have at most {too_much}")
            if at and at % YIELD_BYTES == 0:
                await asyncio.sleep(0)

    async def _received(self, request: web.BaseRequest) -> tuple[bytes, bool]:
        """Return a request's body, inflated, and whether it can be parsed on the event loop."""
        limits = self._limits
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # curl waits a second for it otherwise
        most = request.client_max_size
        if (request.content_length or 0) > most:
            raise self._too_large()
        try:
            encoding = request.headers.get("Content-Encoding", "").lower()
            scan = BodyScan(self._most) if encoding in ("", "identity") else None
            if request.content.is_eof():
                body = request.content.read_nowait()  # it came with its head, as nearly all do
            else:
                async with asyncio.timeout(limits.body_s):
                    body = await self._gathered(request.content, most, scan)
            if scan is None:
                body = await self._inflated(body, encoding, most)
        except web.RequestPayloadError as error:  # cut off, or in chunks that are none
            raise bad_json(" ".join(str(error).split())) from error
        except ValueError as error:
            raise bad_json(str(error)) from error
        except TimeoutError as error:
            self.refused("body_wait")
            why = f"the body has not come within {limits.body_s:g} s"
            raise ApiError(408, why, code="body_timeout") from error
        if scan is None or scan.size != len(body):  # it was not scanned while it came
            return body, await self.scanned(body)
        return body, scan.cheap

    async def _inflated(self, body: bytes, encoding: str, most: int) -> bytes:
        """Inflate a body, and whatever is not small beside the loop. Raise ValueError if nobody can, ApiError beyond a bound."""
        with suppress(InflatesTooFar):
            return inflated(body, encoding, min(most, SMALL_BYTES))
        try:
            return await self.long_texts.inflate(len(body), partial(inflated, body, encoding, most))
        except InflatesTooFar as error:
            raise self._too_large() from error

    async def _gathered(self, content: StreamReader, most: int, scan: BodyScan | None) -> bytes:
        """Return a body that is still arriving. `scan` sees each piece at once, so that the rest is not waited for in vain."""
        gathered = bytearray()  # never joined: 45 MB would take 20 ms
        size, all_most = 0, self._limits.bodies_mb_max * MIB
        try:
            while piece := await content.readany():
                if size + len(piece) > most:
                    raise self._too_large()
                if self.body_bytes > size and self.body_bytes + len(piece) > all_most:
                    self.refused("bodies_bytes")
                    why = f"{self.body_bytes // MIB} MB of requests' bodies are being read"
                    raise unavailable(why, "queue_full", RETRY_AFTER_S)
                size += len(piece)
                self.body_bytes += len(piece)
                gathered += piece
                if scan is not None:
                    await self._scan(scan, piece)
        finally:
            self.body_bytes -= size
        return cast(bytes, gathered)  # whoever reads it finds no difference

    def _too_large(self) -> ApiError:
        self.refused("body_bytes")
        why = f"the body is larger than {self._limits.body_mb_max} MB"
        return ApiError(413, why, code="body_too_large")
