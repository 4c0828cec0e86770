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
from controller.router.index.index import KvIndex, ParentNotHeld
from events.kv import (
    Answer,
    Cleared,
    Dump,
    Events,
    KvBatch,
    KvEvent,
    KvRefused,
    KvRequest,
    Stored,
    Tier,
    TooNew,
)
from events.observations import WorkerJoined

AHEAD_MAX = 65_536  # blocks and events buffered until the gap before them is closed
RETRY_S = 0.2
RETRIES_MAX = 6  # doublings of RETRY_S: 12.8 s at most
CLEARED = Cleared()  # not from a worker: what follows replaces everything


@dataclass(slots=True)
class Counts:
    """Counters of the feeds of a frontend."""

    applied: dict[tuple[str, str], int] = field(default_factory=dict)  # events by kind and result
    gaps: int = 0  # number of gaps detected
    recovered: int = 0  # gaps closed
    restored: int = 0  # dumps applied
    failed: int = 0  # requests without a useful answer


@dataclass(slots=True, eq=False, repr=False)
class Feed:
    """Orders the events of one rank of a worker instance, detects gaps, and requests what is missing.

        restoring ──── a complete dump ───▶ following ──── an event beyond the next ────▶ catching up
           ▲    └── event 0, or cleared ──▶    ▲                                          │  │
           │                                   └──────────── nothing is missing ──────────┘  │
           └───────────────────── the worker does not know these ids ────────────────────────┘

        live batch   ids below `next` are dropped, those from `next` on applied, those beyond it kept until the gap is closed
        cleared      a fresh start: the rank holds nothing, whatever was missed before. Event 0 is one, too
        events       must reach back to `next`; a dump replaces everything, part by part

    The events to apply are returned. `Cleared` among them means that the rank holds nothing now. Only the answer to the last
    request counts; it is dropped if a fresh start or the missing events have arrived before it. No rank is ever given up: missing
    events are requested again, with exponential backoff. Events that do not fit into the buffer are requested with the rest.
    `due`: when to send the next request; None: not now.
    """

    rank: int
    _counts: Counts
    due: float | None
    noted: float | None = None  # set by the caller: when it will check `due`
    next: int | None = None  # the id of the next event; None: restoring
    seen: int = 0  # one past the highest event id known to exist
    _asked: KvRequest | None = None  # the request in flight
    _dump: tuple[int, int] | None = None  # the dump being applied, and its next part
    _ahead: dict[int, Sequence[KvEvent]] = field(
        default_factory=dict
    )  # buffered events, by the id of the first
    _weight: int = 0  # of `_ahead`
    _tries: int = 0  # consecutive failed requests
    _gap: bool = False

    @property
    def complete(self) -> bool:
        """Whether all events known to exist were applied."""
        return self.next is not None and self.seen <= self.next

    def take(self, batch: KvBatch, now: float) -> Sequence[KvEvent]:
        """Accept a live batch from the worker. Return the events to apply."""
        first, events = batch.first, batch.events
        self.seen = max(self.seen, first + len(events))
        fresh = self._fresh(first, events)
        if fresh is not None:
            self.due = self._asked = self._dump = None
            self.next = first + len(events)
            return self._settled([events[fresh - 1] if fresh else CLEARED, *events[fresh:]], now)
        if self.next is None or first > self.next:
            self._keep(first, events)
            return self._settled([], now)
        new = list(events[self.next - first :])
        self.next += len(new)
        return self._settled(new, now)

    def _fresh(self, first: int, events: Sequence[KvEvent]) -> int | None:
        """Return the index from which the events of a batch apply without any earlier event; None if there is none."""
        for place in range(len(events) - 1, -1, -1):
            if isinstance(events[place], Cleared) and first + place >= (self.next or 0):
                return place + 1
        return 0 if self.next is None and first == 0 else None

    def doubt(self, due: float) -> None:
        """Send a request at `due` even if nothing seems missing, unless one is in flight."""
        if self._asked is None:
            self.due = due

    def ask(self) -> KvRequest:
        """Return the request to send now. `answer` must be called with its result."""
        self.due = None
        if self._dump is not None:
            self._asked = KvRequest(self.rank, dump=self._dump[0], part=self._dump[1])
        else:
            self._asked = KvRequest(self.rank, first=self.next)
        return self._asked

    def answer(self, ask: KvRequest, answer: Answer | None, now: float) -> Sequence[KvEvent]:
        """Process the response to a request; None: no response. Return the events to apply."""
        if ask is not self._asked:
            return ()
        self._asked = None
        match answer:
            case Events(first=first, events=events) if self.next is not None and first <= self.next:
                if new := list(events[self.next - first :]):
                    self.next += len(new)
                    return self._advanced(new, now)
            case Dump(part=part) if (answer.next, part) == self._dump or (ask.dump is None and part == 0):
                return self._take_dump(answer, now)
            case TooNew(next=newest) if newest == self.next:  # the events that seemed missing do not exist
                self.seen = newest
                return self._advanced([], now)
            case None | KvRefused():
                self._dump = self._dump if answer is None else None
            case _:
                self.next = self._dump = None
        self._counts.failed += 1
        self.due = now + RETRY_S * 2 ** min(self._tries, RETRIES_MAX)
        self._tries += 1
        return ()

    def _take_dump(self, dump: Dump, now: float) -> Sequence[KvEvent]:
        new: list[KvEvent] = [*dump.events] if dump.part else [CLEARED, *dump.events]
        self.next = self._dump = None
        if dump.part + 1 < dump.parts:
            self._dump = dump.next, dump.part + 1
            self._tries, self.due = 0, now
            return new
        self.next = dump.next
        self._counts.restored += 1
        return self._advanced(new, now)

    def _advanced(self, new: list[KvEvent], now: float) -> Sequence[KvEvent]:
        """Continue after a useful response: apply buffered events, and request what is still missing."""
        self._tries, self.due = 0, now  # reset again if nothing is missing
        return self._settled(new, now)

    def _settled(self, new: list[KvEvent], now: float) -> Sequence[KvEvent]:
        """Append the buffered events that are next, and check whether events are missing."""
        if self.next is None:
            return new
        for first in sorted(self._ahead) if self._ahead else ():
            if first > self.next:
                break
            kept = self._drop(first)[self.next - first :]
            new += kept
            self.next += len(kept)
        if self.seen <= self.next:
            self._counts.recovered += self._gap
            self._gap, self._tries = False, 0
            self.due = self._asked = None
            return new
        self._counts.gaps += not self._gap
        self._gap = True
        if self._asked is None and self.due is None:
            self.due = now
        return new

    def _keep(self, first: int, events: Sequence[KvEvent]) -> None:
        weight = _weight(events)
        if events and first not in self._ahead and self._weight + weight <= AHEAD_MAX:
            self._ahead[first] = events
            self._weight += weight

    def _drop(self, first: int) -> Sequence[KvEvent]:
        events = self._ahead.pop(first)
        self._weight -= _weight(events)
        return events


def _weight(events: Sequence[KvEvent]) -> int:
    return sum(1 if isinstance(event, Cleared) else 1 + len(event.blocks) for event in events)


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
