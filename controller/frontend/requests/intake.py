"""What a client's request may cost before it is known to be worth anything: its body, and the reading of its texts.

    bytes ──▶ no more than a body may have, inflated; no more of all bodies at once ──▶ values ──▶ texts ──▶ tokens

Each bound is a setting, and each refusal is counted by its name.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import cast

from aiohttp import StreamReader, web

from controller.frontend.errors import ApiError, invalid, unavailable
from controller.frontend.requests.inflating import SMALL_BYTES, InflatesTooFar, inflated
from controller.frontend.requests.json_values import excess
from controller.frontend.requests.long_texts import RETRY_AFTER_S, LongTexts
from controller.frontend.requests.schema import bad_json
from controller.frontend.settings import FrontendSettings

MIB = 2**20


class Intake:
    """The bounds of one frontend, and what has been taken of them."""

    def __init__(
        self, settings: FrontendSettings, refused: Callable[[str], object] = lambda bound: None
    ) -> None:
        """`refused` is told of each refusal, by the bound."""
        self.refused = refused
        self.long_texts = LongTexts(settings.tokenizing, refused)
        self._limits = settings.admission
        self.body_bytes = 0  # of bodies that are being read

    def check(self, body: bytes) -> None:
        """Raise ApiError (400) if a body has so many values that to decode it would hold everybody up."""
        if too_much := excess(body):
            self.refused("body_values")
            raise invalid(f"a body may have at most {too_much}")

    async def body(self, request: web.BaseRequest) -> bytes:
        """Return a request's body, inflated. Raise ApiError: 400 for a broken one, or one of too many values, 408 after `body_s`,
        413 above the request's `client_max_size`, 503 while all bodies together have `bodies_mb_max`."""
        limits = self._limits
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # curl waits a second for it otherwise
        most = request.client_max_size
        if (request.content_length or 0) > most:
            raise self._too_large()
        try:
            encoding = request.headers.get("Content-Encoding", "").lower()
            if request.content.is_eof():
                body = request.content.read_nowait()  # it came with its head, as nearly all do
            else:
                async with asyncio.timeout(limits.body_s):
                    body = await self._gathered(request.content, most)
            if encoding not in ("", "identity"):
                body = await self._inflated(body, encoding, most)
        except web.RequestPayloadError as error:  # cut off, or in chunks that are none
            raise bad_json(" ".join(str(error).split())) from error
        except ValueError as error:
            raise bad_json(str(error)) from error
        except TimeoutError as error:
            self.refused("body_wait")
            why = f"the body has not come within {limits.body_s:g} s"
            raise ApiError(408, why, code="body_timeout") from error
        self.check(body)
        if len(body) > SMALL_BYTES:
            await asyncio.sleep(0)  # its decoding is a turn of its own, after everybody else's
        return body

    async def _inflated(self, body: bytes, encoding: str, most: int) -> bytes:
        """Inflate a body, and whatever is not small beside the loop. Raise ValueError if nobody can, ApiError beyond a bound."""
        with suppress(InflatesTooFar):
            return inflated(body, encoding, min(most, SMALL_BYTES))
        try:
            return await self.long_texts.inflate(len(body), partial(inflated, body, encoding, most))
        except InflatesTooFar as error:
            raise self._too_large() from error

    async def _gathered(self, content: StreamReader, most: int) -> bytes:
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
        finally:
            self.body_bytes -= size
        return cast(bytes, gathered)  # whoever reads it finds no difference

    def _too_large(self) -> ApiError:
        self.refused("body_bytes")
        why = f"the body is larger than {self._limits.body_mb_max} MB"
        return ApiError(413, why, code="body_too_large")
