"""Tokenizes texts that are too long for the event loop, in a few threads.

    more than 16,384 characters ──▶ wait for one of a few threads ──▶ tokens
    more than a million ──────────▶ wait for a thread that has only such texts ──▶ tokens
    a body that decompresses to a large size ─▶ wait for another thread ──▶ its bytes
    too many characters in total, or too long a wait ──▶ 503

A tokenizer needs a second and 100 MB of memory per megabyte of text. With one thread per request, tokenizing would
use all cores and all memory.

A running thread cannot be stopped. If a client disconnects while its text waits, the text leaves the queue. If the
text is being tokenized, the thread stays busy until the end.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from controller.frontend.errors import ApiError, unavailable
from controller.frontend.metrics import BoundMetrics
from controller.frontend.settings import TokenizingSettings

T = TypeVar("T")
LONG_TEXT = 16_384  # a text of this many characters takes milliseconds on the event loop
HUGE_TEXT = 2**20  # a text of this many characters takes a second of a thread
MB = 1_000_000
RETRY_AFTER_S = 1


class LongTexts:
    """Runs tokenization and decompression in a few threads of one frontend, and limits the texts that wait."""

    def __init__(self, settings: TokenizingSettings, bounds: BoundMetrics) -> None:
        """Start without texts. `bounds` counts each refused text."""
        self._settings = settings
        self._bounds = bounds
        self._lanes = tuple(_Lane(most) for most in (settings.long_at_once, settings.huge_at_once))
        self._inflating = _Lane(1)
        self.chars = 0  # total characters of the texts that are being tokenized or wait

    async def read(self, chars: int, work: "partial[T]") -> T:
        """Return the result of `work`, which processes `chars` characters. Work on a long text runs in a thread.

        Raise ApiError (503) if too many characters wait, or if no thread becomes free in time.
        """
        if chars < LONG_TEXT:
            return work()
        return await self._run(self._lanes[chars > HUGE_TEXT], chars, work)

    async def inflate(self, size: int, work: "partial[T]") -> T:
        """Return the result of `work`, which decompresses a body of `size` compressed bytes, in a thread.

        Each compressed byte counts as one waiting character. Raise ApiError (503) if too many characters wait, or if
        the thread does not become free in time.
        """
        return await self._run(self._inflating, size, work)

    async def _run(self, lane: "_Lane", chars: int, work: "partial[T]") -> T:
        most = self._settings.waiting_mb_max * MB
        if self.chars and self.chars + chars > most:
            why = f"texts with {self.chars} characters are already waiting"
            raise self._busy("long_texts", "queue_full", why)
        self.chars += chars
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await lane.free.acquire()
        except BaseException as error:
            self.chars -= chars
            if isinstance(error, TimeoutError):
                why = f"no thread became free within {self._settings.wait_s:g} s"
                raise self._busy("long_text_wait", "queue_timeout", why) from error
            raise
        running = asyncio.wrap_future(lane.threads.submit(work))
        running.add_done_callback(partial(self._ended, lane, chars))
        return await asyncio.shield(running)

    def _ended(self, lane: "_Lane", chars: int, running: "asyncio.Future[T]") -> None:
        self.chars -= chars
        lane.free.release()
        if not running.cancelled():
            running.exception()  # mark as retrieved, even if the client has disconnected

    def _busy(self, bound: str, code: str, why: str) -> ApiError:
        self._bounds.count(bound)
        return unavailable(f"this frontend has too many long texts: {why}", code, RETRY_AFTER_S)


class _Lane:
    """A group of threads, and a semaphore with one permit per thread."""

    def __init__(self, most: int) -> None:
        self.free = asyncio.Semaphore(most)
        self.threads = ThreadPoolExecutor(most, thread_name_prefix="tokenizing")
