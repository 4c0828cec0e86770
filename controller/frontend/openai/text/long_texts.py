"""Threads that read the texts that are too long for the event loop, a few at once.

    more than 16,384 characters ──▶ wait for one of a few threads ──▶ tokens
    more than a million ──────────▶ wait for one that has only such ──▶ tokens
    a body that inflates by much ─▶ wait for another one ─────────────▶ its bytes
    too many characters in all, or too long a wait ──▶ 503

A tokenizer takes a second and 100 MB for a megabyte: as many threads as requests took all cores and all memory.

A thread cannot be stopped. A client that goes away gives up its turn while it waits; once its text is being read, the thread is
free when it has been.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from controller.frontend.errors import ApiError, unavailable
from controller.frontend.metrics import BoundMetrics
from controller.frontend.settings import TokenizingSettings

LONG_TEXT = 16_384  # characters: milliseconds of the event loop
HUGE_TEXT = 2**20  # characters: a second of a thread
MB = 1_000_000
RETRY_AFTER_S = 1


class LongTexts:
    """The threads of one frontend that tokenise, and what waits for them."""

    def __init__(self, settings: TokenizingSettings, bounds: BoundMetrics) -> None:
        """`bounds` count each text that is refused."""
        self._settings = settings
        self._bounds = bounds
        self._lanes = tuple(_Lane(most) for most in (settings.long_at_once, settings.huge_at_once))
        self._inflating = _Lane(1)
        self.chars = 0  # that are read, or wait

    async def read(self, chars: int, work: "partial[Any]") -> Any:
        """Return what `work` returns, which reads so many characters: at once if they are few. Raise ApiError (503) beyond a
        bound."""
        if chars < LONG_TEXT:
            return work()
        return await self._run(self._lanes[chars > HUGE_TEXT], chars, work)

    async def inflate(self, size: int, work: "partial[Any]") -> Any:
        """Return what `work` returns, which inflates a body of so many bytes. Raise ApiError (503) beyond a bound."""
        return await self._run(self._inflating, size, work)

    async def _run(self, lane: "_Lane", chars: int, work: "partial[Any]") -> Any:
        most = self._settings.waiting_mb_max * MB
        if self.chars and self.chars + chars > most:
            raise self._busy("long_texts", "queue_full", f"texts of {self.chars} characters are waiting")
        self.chars += chars
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await lane.free.acquire()
        except BaseException as error:
            self.chars -= chars
            if isinstance(error, TimeoutError):
                why = f"it was not this text's turn within {self._settings.wait_s:g} s"
                raise self._busy("long_text_wait", "queue_timeout", why) from error
            raise
        running = asyncio.wrap_future(lane.threads.submit(work))
        running.add_done_callback(partial(self._ended, lane, chars))
        return await asyncio.shield(running)

    def _ended(self, lane: "_Lane", chars: int, running: "asyncio.Future[Any]") -> None:
        self.chars -= chars
        lane.free.release()
        if not running.cancelled():
            running.exception()  # retrieved also where the client has disconnected

    def _busy(self, bound: str, code: str, why: str) -> ApiError:
        self._bounds.count(bound)
        return unavailable(f"this frontend has too much to read: {why}", code, RETRY_AFTER_S)


class _Lane:
    """Threads, and the turns of what waits for one."""

    def __init__(self, most: int) -> None:
        self.free = asyncio.Semaphore(most)
        self.threads = ThreadPoolExecutor(most, thread_name_prefix="tokenizing")
