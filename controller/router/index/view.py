"""The KV view of one frontend: the index, and one feed per rank that reports its blocks.

    absorb   the live workers: a new rank is restored, a rank that is gone is dropped
    take     workers' live events   ┐
    answer   their responses        ├─▶ feed ─▶ events ─▶ index
    due      the next request       ┘

The caller transports messages and supplies the time. Nothing here blocks.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from operator import is_
from random import random

from controller.router.endpoints import RANKS_MAX, Key, WorkerRank
from controller.router.index.feed import CLEARED, Counts, Feed
from controller.router.index.index import KvIndex, ParentNotHeld
from events.kv import Answer, Cleared, KvBatch, KvEvent, KvRequest, Stored, Tier
from events.observations import WorkerJoined

SLACK = 1.05  # times the registered blocks: events of one step may arrive out of order
SLACK_BLOCKS = 256
TIERED_MAX = 256  # times the registered blocks, over all tiers: slower tiers are not registered
LOOK_AGAIN = 1.25  # growth of a rank's blocks until they are counted again
CLAIMED_MIN = 64  # tokens; a smaller claim attracts no request
JUDGED = 16  # last claims of an instance that are judged
WRONG = 12  # wrong ones among these that lose the claims
# A new rank is queried after a random delay up to this, so that frontends that start together do not query at once.
FIRST_S = 0.003
DOUBT_S = 0.5  # maximum random delay of all ranks after the broker is reachable again


@dataclass(slots=True)
class KvClaims:
    """Compares workers' KV claims with their registration and with what requests found cached.

    A worker loses its claims if it claims more blocks than it has, or if requests do not find what it claims. It is then treated
    as if it had nothing cached, until its instance ends. A claim is wrong if less than half of it was found. One wrong claim is
    normal, because blocks are evicted. 12 wrong ones among the last 16 claims are not.
    """

    lost: Callable[[Key, str], None] = lambda key, why: None  # called when an instance loses its claims
    disbelieved: set[Key] = field(default_factory=set)
    _blocks: dict[Key, int] = field(default_factory=dict)  # registered
    # how many blocks a rank may claim until they are counted again
    _looked: dict[WorkerRank, float] = field(default_factory=dict)
    _wrong: dict[Key, deque[bool]] = field(default_factory=dict)

    def know(self, blocks: Mapping[Key, int]) -> None:
        """Set the live workers and the number of blocks that each has registered."""
        self._blocks = dict(blocks)
        self.disbelieved &= blocks.keys()
        for gone in self._wrong.keys() - blocks.keys():
            del self._wrong[gone]
        for holder in [holder for holder in self._looked if holder[:2] not in blocks]:
            del self._looked[holder]

    def check(self, holder: WorkerRank, index: KvIndex) -> bool:
        """Return whether a rank claims no more blocks than it can hold. Cheap until it claims many more than last time."""
        held, key = index.count(holder), (holder.worker, holder.instance)
        most = self._blocks.get(key, 0) * SLACK + SLACK_BLOCKS
        if held <= self._looked.get(holder, most):
            return True
        on_device = sum(len(blocks) for tier, _, blocks in index.held(holder) if tier == Tier.DEVICE)
        self._looked[holder] = held * LOOK_AGAIN
        if on_device <= most and held <= most * TIERED_MAX:
            return True
        self._lose(key, f"claim {on_device} KV blocks, and it has registered {self._blocks.get(key, 0)}")
        return False

    def compare(self, key: Key, claimed: int, cached: int) -> None:
        """Compare the prompt tokens that a worker claimed with those that a request found cached."""
        if claimed < CLAIMED_MIN or key in self.disbelieved or key not in self._blocks:
            return
        record = self._wrong.setdefault(key, deque(maxlen=JUDGED))
        record.append(cached * 2 < claimed)
        if sum(record) >= WRONG:
            self._lose(key, f"claim cached prompts that {sum(record)} of {len(record)} requests did not find")

    def _lose(self, key: Key, why: str) -> None:
        self.disbelieved.add(key)
        self.lost(key, why)


@dataclass(frozen=True, slots=True)
class KvHealth:
    """The completeness of the index."""

    ranks: int  # ranks that report their blocks
    complete: int  # ranks with all known events applied
    blocks: int  # distinct blocks, over all ranks

    def __str__(self) -> str:
        return f"{self.blocks} blocks of {self.complete} of {self.ranks} ranks"


class KvView:
    """The index of one frontend, and the feeds that keep it correct. One task owns it."""

    def __init__(self, dice: Callable[[], float] = random) -> None:
        self.index = KvIndex()
        self.find = self.index.find  # leading blocks of a prompt per rank
        self.counts = Counts()
        self._dice = dice
        self._joined: list[WorkerJoined] = []
        self._feeds: dict[WorkerRank, Feed] = {}
        self.claims = KvClaims()
        # a heap; an entry stays in it even if its rank was queried earlier or is gone
        self._due: list[tuple[float, int, WorkerRank]] = []
        self._turn = count()

    def absorb(self, joined: Iterable[WorkerJoined], now: float) -> None:
        """Follow the ranks of these live workers that report their blocks, and no others. Cheap if no worker joined or left."""
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
        """Compare the prompt tokens that a rank claimed with those that a request found cached there."""
        key = (holder.worker, holder.instance)
        self.claims.compare(key, claimed, cached)
        if key in self.claims.disbelieved:
            self._disbelieve(key)

    def _disbelieve(self, key: Key) -> None:
        """Stop following an instance, and drop its claims."""
        for holder in [holder for holder in self._feeds if holder[:2] == key]:
            del self._feeds[holder]
            self.index.forget(holder)

    def complete(self, holder: WorkerRank) -> bool:
        """Return whether all events known to exist for a rank are applied."""
        feed = self._feeds.get(holder)
        return feed is not None and feed.complete

    @property
    def health(self) -> KvHealth:
        """The current completeness of the index."""
        complete = sum(feed.complete for feed in self._feeds.values())
        return KvHealth(len(self._feeds), complete, len(self.index))

    # --- messages from workers

    def take(self, batch: KvBatch, now: float) -> None:
        """Apply a live batch from a worker. A batch of a rank that is not followed is dropped; the rank is queried later."""
        holder = WorkerRank(batch.worker, batch.instance, batch.rank)
        feed = self._feeds.get(holder)
        if feed is not None:
            self._apply(holder, feed.take(batch, now))
            if holder in self._feeds:
                self._note(holder, feed)

    def answer(self, holder: WorkerRank, ask: KvRequest, answer: Answer | None, now: float) -> None:
        """Apply the response to a request; None: no response."""
        feed = self._feeds.get(holder)
        if feed is not None:
            self._apply(holder, feed.answer(ask, answer, now))
            if holder in self._feeds:
                self._note(holder, feed)

    # --- requests to workers

    def due(self, now: float) -> tuple[WorkerRank, KvRequest] | None:
        """Return one request that is due, and its rank. `answer` must follow."""
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
        """When to call `due` next; infinity: not before something is received."""
        return self._due[0][0] if self._due else inf

    def doubt(self, now: float) -> None:
        """Query all ranks soon: events may have been lost without notice."""
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
    """Apply one event. Return its kind and result.

    The result is `ok`, `parent_block_not_found`, `block_not_found`, or `invalid_block` (blocks at two depths, unknown tiers).
    """
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
    except ParentNotHeld:
        return kind, "parent_block_not_found"
    except ValueError:  # `Misplaced` is one
        return kind, "invalid_block"
    return kind, "ok"
