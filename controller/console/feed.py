"""Sends the console's data to its viewers: first a full snapshot, then each second what has changed.

A viewer is an open page. While there are viewers, one snapshot per second is taken, which all viewers share. The recent changes
are kept as encoded bytes, and the feed knows which change each viewer got last. If a slow viewer needs a change that is no longer
kept, the viewer gets a new snapshot. No data therefore queues up for a slow viewer.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import structlog

from controller.console.rows import Sections, changes
from events.errors import HoldfastError

EVERY_S = 1.0  # seconds between two snapshots
BEAT_S = 5.0  # without changes for this many seconds, a viewer gets a `beat`, so that the page can detect a lost connection
VIEWERS_MAX = 32
KEPT_MAX = 20  # number of changes that are kept; a viewer that is further behind gets a new snapshot
AGAIN_S = 5.0  # seconds until snapshots are taken again after an internal error

log = structlog.get_logger(__name__)
_encode = msgspec.json.Encoder().encode


class TooManyViewers(HoldfastError):
    """This frontend's console has too many viewers. Close a page, or use the console of another frontend."""


Times = Mapping[str, int]
"""The current time in milliseconds since 1970: `at` by this host's clock, and `now` by the broker's clock."""


@dataclass(slots=True)
class NumberedPicture:
    """A snapshot of all data that the page shows, with a number that increases with each snapshot."""

    number: int
    times: Times
    sections: Sections
    whole: bytes = b""  # the encoded snapshot; empty until a viewer needs it

    def snapshot(self) -> bytes:
        """Return the whole snapshot as an encoded server-sent event. Repeated calls do not encode the snapshot again."""
        if not self.whole:
            self.whole = event("snapshot", {**self.times, "sections": self.sections})
        return self.whole


def event(name: str, body: object) -> bytes:
    """Return one server-sent event. The body takes a single `data` line because encoded JSON has no line breaks."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(body))


class ConsoleFeed:
    """Takes snapshots of the console's data while there are viewers, and sends each viewer the changes."""

    def __init__(
        self,
        take: Callable[[], Sections],
        times: Callable[[], Times],
        begin: Callable[[], Awaitable[None]],
        *,
        beat_s: float = BEAT_S,
        again_s: float = AGAIN_S,
    ) -> None:
        """Create a feed without viewers.

        `take` returns the sections of a snapshot. `times` returns the current time by two clocks, this host's and the broker's.
        `begin` is awaited before snapshots start: when a first viewer arrives, and after an internal error. After such an error,
        snapshots pause for `again_s` seconds. A viewer gets the event `beat` after `beat_s` seconds without a change."""
        self._take, self._times, self._begin = take, times, begin
        self._beat_s, self._again_s = beat_s, again_s
        self._taken: NumberedPicture | None = None
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_MAX)
        self._numbers = 0
        self._viewers = 0
        self._watched = asyncio.Event()
        # completed by the next snapshot; None: no viewer waits
        self._news: asyncio.Future[None] | None = None
        self._over = False

    @property
    def viewers(self) -> int:
        """Number of viewers that are connected now."""
        return self._viewers

    @property
    def holds(self) -> bool:
        """Whether the feed holds a snapshot; False while there are no viewers."""
        return self._taken is not None

    async def run(self) -> None:
        """Take a snapshot each second while there are viewers, until cancelled.

        An internal error is logged, and snapshots are taken again later, because an error here must not end the frontend."""
        try:
            while True:
                await self._watched.wait()
                try:
                    await self._begin()
                    while self._viewers:
                        self.take()
                        await asyncio.sleep(EVERY_S)
                except Exception:
                    log.exception("console_failed")
                    await asyncio.sleep(self._again_s)
                self._forget()
        finally:
            self._over = True
            self._wake()

    def take(self) -> None:
        """Take a snapshot, and wake the viewers if anything has changed since the last snapshot."""
        times, sections, before = self._times(), self._take(), self._taken
        new = changes(before.sections, sections) if before is not None else {}
        if before is not None and not new:
            return
        self._numbers += 1
        taken = NumberedPicture(self._numbers, times, sections)
        if before is not None:
            self._kept.append((taken.number, event("changes", {**taken.times, "sections": new})))
        self._taken = taken
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        self._news = None

    def _forget(self) -> None:
        if not self._viewers:
            self._taken = None
            self._kept.clear()
            self._watched.clear()

    @contextmanager
    def subscribe(self) -> Iterator[AsyncIterator[bytes]]:
        """Register a viewer until the context ends, and yield an iterator of encoded server-sent events for the viewer.

        Raise TooManyViewers if VIEWERS_MAX viewers are registered already."""
        if self._viewers >= VIEWERS_MAX:
            raise TooManyViewers(TooManyViewers.__doc__)
        self._viewers += 1
        self._watched.set()
        try:
            yield self._follow()
        finally:
            self._viewers -= 1

    async def _follow(self) -> AsyncIterator[bytes]:
        seen = 0
        while not self._over:
            if self._taken is None or self._taken.number == seen:
                if not await self._wait_for_news():
                    yield event("beat", self._times())
                continue
            missed = [(number, data) for number, data in self._kept if number > seen]
            if seen and missed and missed[0][0] == seen + 1:
                seen = missed[-1][0]
                yield b"".join(data for _, data in missed)
            else:
                seen = self._taken.number
                yield self._taken.snapshot()

    async def _wait_for_news(self) -> bool:
        """Wait up to `_beat_s` seconds for the next snapshot or the end of the feed. Return False after a timeout."""
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait((self._news,), timeout=self._beat_s)
        return bool(done)
