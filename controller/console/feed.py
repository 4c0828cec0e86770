"""Who looks at the console, and what each is sent: all of it once, and then only what has changed, once a second.

A picture is taken once for all who look, and none while nobody does. What has changed is kept for a while, in the bytes that
are sent; each who looks has a place in it. Whoever is so slow that his place is gone begins anew with all of it, so that nothing
queues up for anybody.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import structlog

from controller.console.sections import Sections, changes
from events.errors import HoldfastError

EVERY_S = 1.0
BEAT_S = 5.0  # a page that hears nothing for longer says so
LOOKERS_MAX = 32
KEPT_MAX = 20  # changes: who is further behind begins anew
AGAIN_S = 5.0  # after a mistake of ours

log = structlog.get_logger(__name__)
_encode = msgspec.json.Encoder().encode


class TooManyLook(HoldfastError):
    """So many look at the console already that this frontend lets nobody else: close a page, or look at another frontend's."""


Times = Mapping[str, int]
"""`at`: by this host's clock; `now`: by the stream's. Milliseconds since 1970."""


@dataclass(slots=True)
class Taken:
    """A picture, numbered."""

    number: int
    times: Times
    sections: Sections
    whole: bytes = b""  # of it, as it is sent; made when somebody wants it

    def snapshot(self) -> bytes:
        """Return all of it as an event."""
        if not self.whole:
            self.whole = event("snapshot", {**self.times, "sections": self.sections})
        return self.whole


def event(name: str, body: object) -> bytes:
    """Return one server-sent event. JSON has no line ends of its own."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(body))


class ConsoleFeed:
    """The pictures, and who looks at them."""

    def __init__(
        self,
        take: Callable[[], Sections],
        times: Callable[[], Times],
        begin: Callable[[], Awaitable[None]],
        *,
        beat_s: float = BEAT_S,
        again_s: float = AGAIN_S,
    ) -> None:
        """`take` makes a picture, of the time that `times` says; `begin` is awaited before the first after nobody has looked."""
        self._take, self._times, self._begin = take, times, begin
        self._beat_s, self._again_s = beat_s, again_s
        self._taken: Taken | None = None
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_MAX)
        self._numbers = 0
        self._lookers = 0
        self._looked = asyncio.Event()
        self._news: asyncio.Future[None] | None = None  # ends with the next picture
        self._over = False

    @property
    def lookers(self) -> int:
        """How many look now."""
        return self._lookers

    @property
    def holds(self) -> bool:
        """Whether a picture is kept, to tell what changes next."""
        return self._taken is not None

    async def run(self) -> None:
        """Take pictures for as long as somebody looks. A mistake of ours ends no frontend: it is logged, and tried again."""
        try:
            while True:
                await self._looked.wait()
                try:
                    await self._begin()
                    while self._lookers:
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
        """Take a picture, and tell those who look what has changed."""
        times, sections, before = self._times(), self._take(), self._taken
        new = changes(before.sections, sections) if before is not None else {}
        if before is not None and not new:
            return
        self._numbers += 1
        taken = Taken(self._numbers, times, sections)
        if before is not None:
            self._kept.append((taken.number, event("changes", {**taken.times, "sections": new})))
        self._taken = taken
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        self._news = None

    def _forget(self) -> None:
        if not self._lookers:
            self._taken = None
            self._kept.clear()
            self._looked.clear()

    @contextmanager
    def looking(self) -> Iterator[AsyncIterator[bytes]]:
        """Look for a while: yield what is sent. Raise TooManyLook."""
        if self._lookers >= LOOKERS_MAX:
            raise TooManyLook(TooManyLook.__doc__)
        self._lookers += 1
        self._looked.set()
        try:
            yield self._follow()
        finally:
            self._lookers -= 1

    async def _follow(self) -> AsyncIterator[bytes]:
        seen = 0
        while not self._over:
            if self._taken is None or self._taken.number == seen:
                if not await self._hear():
                    yield event("beat", self._times())
                continue
            missed = [(number, told) for number, told in self._kept if number > seen]
            if seen and missed and missed[0][0] == seen + 1:
                seen = missed[-1][0]
                yield b"".join(told for _, told in missed)
            else:
                seen = self._taken.number
                yield self._taken.snapshot()

    async def _hear(self) -> bool:
        """Wait for the next picture, for `BEAT_S`; say whether it came."""
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait((self._news,), timeout=self._beat_s)
        return bool(done)
