"""What one frontend knows of everybody's KV blocks: the index, and a feed for every rank that says what it holds.

    absorb   who lives: a new rank is restored, one that is gone is forgotten
    take     what workers say       ┐
    answer   what they answer       ├─▶ feed ─▶ events ─▶ index
    due      whom to ask now        ┘

The shell carries messages and tells the time; nothing here waits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from operator import is_
from random import random

from controller.router.endpoints import RANKS_MAX, Key, WorkerRank
from controller.router.index.claims import KvClaims
from controller.router.index.feed import CLEARED, Counts, Feed
from controller.router.index.index import KvIndex, NoParent
from events.kv import Answer, Cleared, KvBatch, KvEvent, KvRequest, Stored, Tier
from events.observations import WorkerJoined

# A new rank is asked within so long, at random: frontends that start together do not ask as one.
FIRST_S = 0.003
DOUBT_S = 0.5  # the same for all ranks after a broker's return


@dataclass(frozen=True, slots=True)
class KvHealth:
    """How complete the index is."""

    ranks: int  # that say what they hold
    complete: int  # of which everything is known that they are known to have said
    blocks: int  # different ones, over all ranks

    def __str__(self) -> str:
        return f"{self.blocks} blocks of {self.complete} of {self.ranks} ranks"


class KvView:
    """The index of one frontend, and what keeps it right. One task owns it."""

    def __init__(self, dice: Callable[[], float] = random) -> None:
        self.index = KvIndex()
        self.find = self.index.find  # how many of these blocks each rank has
        self.counts = Counts()
        self._dice = dice
        self._joined: list[WorkerJoined] = []
        self._feeds: dict[WorkerRank, Feed] = {}
        self.claims = KvClaims()
        # a heap; a rank that is asked earlier, or no more, stays in it
        self._due: list[tuple[float, int, WorkerRank]] = []
        self._turn = count()

    def absorb(self, joined: Iterable[WorkerJoined], now: float) -> None:
        """Take in who lives: follow exactly the ranks of these workers that say what they hold. Hardly anything where
        nobody has come or gone."""
        joined = list(joined)
        if len(joined) == len(self._joined) and all(map(is_, joined, self._joined)):
            return
        self._joined = joined
        self.claims.know({(w.worker, w.instance): w.profile.kv_blocks for w in joined if w.kv_events})
        living = [
            WorkerRank(w.worker, w.instance, rank)
            for w in joined
            if w.kv_events and (w.worker, w.instance) not in self.claims.disbelieved
            for rank in range(min(w.dp, RANKS_MAX))
        ]
        for gone in self._feeds.keys() - living:
            del self._feeds[gone]
            self.index.forget(gone)
        for holder in living:
            if holder not in self._feeds:
                self._feeds[holder] = Feed(holder.rank, self.counts, now + self._dice() * FIRST_S)
                self._note(holder, self._feeds[holder])

    def compare(self, holder: WorkerRank, claimed: int, cached: int) -> None:
        """Compare how many prompt tokens a rank claimed with how many a request found cached there."""
        key = (holder.worker, holder.instance)
        self.claims.compare(key, claimed, cached)
        if key in self.claims.disbelieved:
            self._disbelieve(key)

    def _disbelieve(self, key: Key) -> None:
        """Follow a life no more, and forget what it has claimed."""
        for holder in [holder for holder in self._feeds if holder[:2] == key]:
            del self._feeds[holder]
            self.index.forget(holder)

    def complete(self, holder: WorkerRank) -> bool:
        """Return whether everything is known that a rank is known to have said."""
        feed = self._feeds.get(holder)
        return feed is not None and feed.complete

    @property
    def health(self) -> KvHealth:
        """How complete the index is now."""
        complete = sum(feed.complete for feed in self._feeds.values())
        return KvHealth(len(self._feeds), complete, len(self.index))

    # --- what workers say

    def take(self, batch: KvBatch, now: float) -> None:
        """Take in what a worker said unasked. Of one that is not followed it is dropped: it will be asked in time."""
        holder = WorkerRank(batch.worker, batch.instance, batch.rank)
        feed = self._feeds.get(holder)
        if feed is not None:
            self._apply(holder, feed.take(batch, now))
            if holder in self._feeds:
                self._note(holder, feed)

    def answer(self, holder: WorkerRank, ask: KvRequest, answer: Answer | None, now: float) -> None:
        """Take in what came back for a question; None: nothing did."""
        feed = self._feeds.get(holder)
        if feed is not None:
            self._apply(holder, feed.answer(ask, answer, now))
            if holder in self._feeds:
                self._note(holder, feed)

    # --- whom to ask

    def due(self, now: float) -> tuple[WorkerRank, KvRequest] | None:
        """Return one question that is due, and whom to ask. `answer` must follow."""
        while self._due and self._due[0][0] <= now:
            holder = heappop(self._due)[2]
            feed = self._feeds.get(holder)
            if feed is not None:
                feed.noted = None
                if feed.due is not None and feed.due <= now:
                    return holder, feed.ask()
                self._note(holder, feed)
        return None

    @property
    def due_at(self) -> float:
        """When to look for what is due; infinity: nothing will be, unless something is said."""
        return self._due[0][0] if self._due else inf

    def doubt(self, now: float) -> None:
        """Ask everybody soon: something may have been lost, and nobody would say so."""
        for holder, feed in self._feeds.items():
            feed.doubt(now + self._dice() * DOUBT_S)
            self._note(holder, feed)

    def _note(self, holder: WorkerRank, feed: Feed) -> None:
        if feed.due is not None and (feed.noted is None or feed.due < feed.noted):
            feed.noted = feed.due
            heappush(self._due, (feed.due, next(self._turn), holder))

    # --- the index

    def _apply(self, holder: WorkerRank, events: Sequence[KvEvent]) -> None:
        for event in events:
            if event is CLEARED:
                self.index.forget(holder)
                continue
            kind, status = apply(self.index, holder, event)
            self.counts.applied[kind, status] = self.counts.applied.get((kind, status), 0) + 1
        if events and not self.claims.check(holder, self.index):
            self._disbelieve((holder.worker, holder.instance))


def apply(index: KvIndex, holder: WorkerRank, event: KvEvent) -> tuple[str, str]:
    """Apply one event. Return its kind and how it went: `ok`, `parent_block_not_found`, `block_not_found`, or
    `invalid_block` for blocks at two depths, and on tiers that nobody knows."""
    if isinstance(event, Cleared):
        index.forget(holder)
        return "cleared", "ok"
    kind = "stored" if isinstance(event, Stored) else "removed"
    try:
        tier = Tier(event.tier)
        if isinstance(event, Stored):
            index.store(holder, event.parent, event.blocks, tier)
        elif index.remove(holder, event.blocks, tier):
            return kind, "block_not_found"
    except NoParent:
        return kind, "parent_block_not_found"
    except ValueError:  # `Misplaced` is one
        return kind, "invalid_block"
    return kind, "ok"
