"""The outbox: observed facts that are not acknowledged yet, in order, in memory and in the spool.

Every fact has a token. Tokens increase in the order of observation; facts that earlier processes left have the lowest.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

import structlog

from events.codec import BODY_BYTES_MAX
from events.journal.counters import JournalCounters
from events.journal.spool import BYTES_MAX, OutboxMessage, Spool

MARK_EVERY = 64  # acknowledgements per mark in the spool
RECENT = 2000  # acknowledged sequences kept to detect that a fact was overtaken
OVERHEAD_BYTES = 400  # of a fact's subject, headers and records, besides its body

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class OutboxEntry:
    """One fact that waits for its acknowledgement."""

    message: OutboxMessage
    own: bool  # observed by this process, not left by an earlier one
    sent_at: float = 0.0  # monotonic; the last attempt

    @property
    def size(self) -> int:
        return len(self.message.body) + OVERHEAD_BYTES


class Outbox:
    """The facts that wait, bounded in bytes."""

    def __init__(self, spool: Spool | None, counters: JournalCounters) -> None:
        self.bytes = 0
        # a flag for `flush`: something was acknowledged, or the connection changed
        self.moved = asyncio.Event()
        self._spool = spool
        self._counters = counters
        self._bytes_max = spool.bytes_max if spool is not None else BYTES_MAX
        self._open: dict[int, OutboxEntry] = {}
        self._next = 0
        self._last_number = 0  # of the last fact of this process
        self._inherited = 0
        self._unmarked = 0
        self._full = False
        self._recent: deque[tuple[str, int, int]] = deque(maxlen=RECENT)  # source, number, sequence
        self._top: dict[str, int] = {}  # highest acknowledged number of each source

    def __len__(self) -> int:
        return len(self._open)

    def get(self, token: int) -> OutboxEntry | None:
        """Return a fact that still waits for its acknowledgement, or None."""
        return self._open.get(token)

    def inherit(self) -> list[int]:
        """Take over the facts that earlier processes left, and return their tokens."""
        if self._spool is None:
            return []
        tokens = [self._enter(message, own=False) for message in self._spool.take_over()]
        self._inherited = len(tokens)
        self._forget_earlier()
        return tokens

    def add(self, message: OutboxMessage) -> int | None:
        """Add one fact and return its token. Beyond the bound it is dropped, counted and logged."""
        self._counters.observed += 1
        if len(message.body) > BODY_BYTES_MAX:  # every reader would skip it
            self._counters.dropped += 1
            log.error("fact_dropped", why="it is larger than an event may be", subject=message.subject)
            return None
        if self.bytes + len(message.body) + OVERHEAD_BYTES > self._bytes_max:
            self._counters.dropped += 1
            if not self._full:
                self._full = True
                log.error("facts_dropped", why="the spool is full", waiting=len(self._open))
            return None
        if self._full:
            self._full = False
            log.warning("facts_kept_again", dropped=self._counters.dropped)
        self._last_number = message.number
        if self._spool is not None:
            self._spool.put(message)  # if the write fails, the fact is still in memory
        return self._enter(message, own=True)

    def _enter(self, message: OutboxMessage, *, own: bool) -> int:
        token, self._next = self._next, self._next + 1
        entry = OutboxEntry(message, own)
        self._open[token] = entry
        self.bytes += entry.size
        return token

    def give_up(self, token: int, why: str) -> None:
        """Drop a fact that the broker will never accept."""
        entry = self.settle(token)
        self._counters.dropped += 1
        log.error("fact_dropped", why=why, subject=entry.message.subject, number=entry.message.number)

    def settle(self, token: int) -> OutboxEntry:
        """Remove a fact that needs no more sending, and return it."""
        entry = self._open.pop(token)
        self.bytes -= entry.size
        if not entry.own:
            self._inherited -= 1
            self._forget_earlier()
        self._unmarked += 1
        if self._spool is not None and (not self._open or self._unmarked >= MARK_EVERY):
            self._unmarked = 0
            waiting = next((e.message.number for e in self._open.values() if e.own), self._last_number + 1)
            self._spool.mark(waiting - 1, empty=not self._open)
        return entry

    def _forget_earlier(self) -> None:
        if self._inherited == 0 and self._spool is not None:
            self._spool.forget_earlier()

    def overtaken(self, message: OutboxMessage, seq: int) -> bool:
        """Return whether a later fact of the same source was stored before this one: then every fold drops this one."""
        source, number = message.headers["ce-source"], message.number
        self._recent.append((source, number, seq))
        if number > self._top.get(source, 0):
            self._top[source] = number
            return False
        return any(s == source and n > number and q < seq for s, n, q in self._recent)

    async def flush(self, deadline_s: float, broker_away: "asyncio.Event") -> bool:
        """Wait until everything observed so far is acknowledged, or synced to disk while the broker is unreachable."""
        last = self._next - 1
        try:
            async with asyncio.timeout(deadline_s):
                while next(iter(self._open), last + 1) <= last:
                    if broker_away.is_set() and self._spool is not None:
                        await asyncio.to_thread(self._spool.sync)
                        return self._spool.failures == 0
                    self.moved.clear()
                    await self.moved.wait()
        except TimeoutError:
            return False
        return True

    def sync(self) -> None:
        """Sync the waiting facts to disk."""
        if self._spool is not None and self._open:
            self._spool.sync()

    def close(self) -> None:
        """Close the spool; facts without acknowledgement stay in it."""
        if self._spool is not None:
            self._spool.close(empty=not self._open)
