"""The KV view of a frontend: the index of cached blocks, and one feed of KV events per DP rank.

    absorb   the live workers: all blocks of a new rank are requested, a rank that is gone is dropped
    take     live KV-event batches of workers   ┐
    answer   responses to requests              ├─▶ feed ─▶ events ─▶ index
    due      the next request to send           ┘

These are methods of `KvView`. The caller transports messages and supplies the time. Nothing in this module blocks.
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
from events import kv
from events.observations import WorkerJoined

AHEAD_MAX = 65_536  # blocks and events that are buffered until the events missing before them have arrived
RETRY_S = 0.2  # seconds until a failed request is sent again, doubled after each further failure
RETRIES_MAX = 6  # largest number of doublings of RETRY_S: 12.8 s
CLEARED = kv.Cleared()  # added by this frontend, not sent by a worker: the events after it replace everything


@dataclass(slots=True)
class Counts:
    """Counters of all feeds of a frontend."""

    applied: dict[tuple[str, str], int] = field(default_factory=dict)  # events by kind and result
    gaps: int = 0  # times at which missing events were detected
    recovered: int = 0  # times at which all missing events had arrived
    restored: int = 0  # complete dumps that were applied
    failed: int = 0  # requests without a useful response


@dataclass(slots=True, eq=False, repr=False)
class Feed:
    """Puts the KV events of one rank in order, detects missing events, and requests them.

    restoring ──── a complete dump ───▶ following ──── an id higher than `next` ────▶ catching up
       ▲    └── event 0, or cleared ──▶    ▲                                          │  │
       │                                   └──────────── nothing is missing ──────────┘  │
       └───────────────────── the worker does not know these ids ────────────────────────┘

    live batch   `next` is the id of the event to apply next. Events with a lower id are dropped, a batch that contains `next` is
                 applied from there on, and a batch that begins with a higher id is buffered.
    cleared      a fresh start: the rank holds nothing, so missed events do not matter. Event 0 is a fresh start, too.
    events       the response to a request for events. If it begins after `next`, all blocks are requested.
    dump         the response with all blocks, in parts. It replaces everything.

    `take` and `answer` return the events to apply. A `Cleared` event in the result means that the rank holds nothing at that
    point. A response is ignored if a later request was sent. It is also ignored if the feed had a fresh start, or received all
    missing events, before the response came. Missing events are requested again without limit, with exponential backoff. Events
    that do not fit into the buffer are requested like missing events. `due` is the time of the next request, or None if no
    request is due.
    """

    rank: int
    _counts: Counts
    due: float | None
    noted: float | None = None  # time at which the caller will check `due`; set by the caller
    next: int | None = None  # id of the next event to apply; None while restoring
    seen: int = 0  # highest event id known to exist, plus one
    _asked: kv.KvRequest | None = None  # the request in flight
    # id of the dump that is being applied, and the number of its next part
    _dump: tuple[int, int] | None = None
    # buffered events, by the id of the first
    _ahead: dict[int, Sequence[kv.KvEvent]] = field(default_factory=dict)
    _weight: int = 0  # number of blocks and events in `_ahead`
    _tries: int = 0  # consecutive failed requests
    _gap: bool = False

    @property
    def complete(self) -> bool:
        """Whether all events of the rank that are known to exist were applied."""
        return self.next is not None and self.seen <= self.next

    def take(self, batch: kv.KvBatch, now: float) -> Sequence[kv.KvEvent]:
        """Accept a live KV-event batch of the worker. Return the events to apply."""
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

    def _fresh(self, first: int, events: Sequence[kv.KvEvent]) -> int | None:
        """Return the index in `events` right after the last fresh start; None if the events contain no fresh start.

        A fresh start is a point at which the rank holds nothing, so that no earlier event is needed. There are two kinds:
        the point after a `Cleared` event that was not applied yet and, while the feed waits for a dump, the point before
        event 0.
        """
        for place in range(len(events) - 1, -1, -1):
            if isinstance(events[place], kv.Cleared) and first + place >= (self.next or 0):
                return place + 1
        return 0 if self.next is None and first == 0 else None

    def doubt(self, due: float) -> None:
        """Schedule a request at the time `due`, even if no event seems to be missing.

        There is no effect while a request is in flight.
        """
        if self._asked is None:
            self.due = due

    def ask(self) -> kv.KvRequest:
        """Return the request to send now. The caller must pass its response to `answer`."""
        self.due = None
        if self._dump is not None:
            self._asked = kv.KvRequest(self.rank, dump=self._dump[0], part=self._dump[1])
        else:
            self._asked = kv.KvRequest(self.rank, first=self.next)
        return self._asked

    def answer(self, ask: kv.KvRequest, answer: kv.Answer | None, now: float) -> Sequence[kv.KvEvent]:
        """Process the response to the KV request `ask`; None if no response came. Return the events to apply."""
        if ask is not self._asked:
            return ()
        self._asked = None
        match answer:
            case kv.Events(first=first, events=events) if self.next is not None and first <= self.next:
                if new := list(events[self.next - first :]):
                    self.next += len(new)
                    return self._advanced(new, now)
            case kv.Dump(part=part) if (answer.next, part) == self._dump or (ask.dump is None and part == 0):
                return self._take_dump(answer, now)
            # the events that seemed to be missing do not exist
            case kv.TooNew(next=newest) if newest == self.next:
                self.seen = newest
                return self._advanced([], now)
            case None | kv.KvRefused():
                self._dump = self._dump if answer is None else None
            case _:
                self.next = self._dump = None
        self._counts.failed += 1
        self.due = now + RETRY_S * 2 ** min(self._tries, RETRIES_MAX)
        self._tries += 1
        return ()

    def _take_dump(self, dump: kv.Dump, now: float) -> Sequence[kv.KvEvent]:
        new: list[kv.KvEvent] = [*dump.events] if dump.part else [CLEARED, *dump.events]
        self.next = self._dump = None
        if dump.part + 1 < dump.parts:
            self._dump = dump.next, dump.part + 1
            self._tries, self.due = 0, now
            return new
        self.next = dump.next
        self._counts.restored += 1
        return self._advanced(new, now)

    def _advanced(self, new: list[kv.KvEvent], now: float) -> Sequence[kv.KvEvent]:
        """Return the events to apply after a useful response: `new`, then buffered ones. Request those still missing."""
        self._tries, self.due = 0, now  # `_settled` resets `due` if nothing is missing
        return self._settled(new, now)

    def _settled(self, new: list[kv.KvEvent], now: float) -> Sequence[kv.KvEvent]:
        """Add the buffered events that follow `new`, and check whether events are missing. Return all events to apply."""
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

    def _keep(self, first: int, events: Sequence[kv.KvEvent]) -> None:
        weight = _weight(events)
        if events and first not in self._ahead and self._weight + weight <= AHEAD_MAX:
            self._ahead[first] = events
            self._weight += weight

    def _drop(self, first: int) -> Sequence[kv.KvEvent]:
        events = self._ahead.pop(first)
        self._weight -= _weight(events)
        return events


def _weight(events: Sequence[kv.KvEvent]) -> int:
    return sum(1 if isinstance(event, kv.Cleared) else 1 + len(event.blocks) for event in events)


SLACK = 1.05  # factor on the registered blocks, because the events of one step may arrive out of order
SLACK_BLOCKS = 256
# factor on the registered blocks for all tiers together, because slower tiers are not registered
TIERED_MAX = 256
LOOK_AGAIN = 1.25  # growth factor of a rank's blocks after which they are counted again
CLAIMED_MIN = 64  # a smaller claim in tokens attracts no request
JUDGED = 16  # number of last claims of an instance that are judged
WRONG = 12  # number of wrong claims among them for which the instance loses its claims
# A new rank is queried after a random delay of at most this many seconds, so that frontends that start together
# spread.
FIRST_S = 0.003
# largest random delay in seconds of the queries to all ranks after the broker is reachable again
DOUBT_S = 0.5


@dataclass(slots=True)
class KvClaims:
    """Checks workers' claims about their cached blocks.

    A claim is what a worker's KV events say about its cache. A claim about a prompt is wrong if the answer reports fewer than
    half of the claimed tokens as cached. A single wrong claim is normal, because blocks are evicted. A worker instance is no
    longer believed if 12 of its last 16 claims were wrong, or if it claims more blocks than it registered. From then on, the
    instance is treated as if it had nothing cached.
    """

    lost: Callable[[Key, str], None] = lambda key, why: None  # called when an instance loses its claims
    disbelieved: set[Key] = field(default_factory=set)
    _blocks: dict[Key, int] = field(default_factory=dict)  # registered number of blocks
    # number of blocks that a rank may claim until they are counted again
    _looked: dict[WorkerRank, float] = field(default_factory=dict)
    _wrong: dict[Key, deque[bool]] = field(default_factory=dict)

    def set_workers(self, blocks: Mapping[Key, int]) -> None:
        """Set the live worker instances, each with its registered number of blocks."""
        self._blocks = dict(blocks)
        self.disbelieved &= blocks.keys()
        for gone in self._wrong.keys() - blocks.keys():
            del self._wrong[gone]
        for holder in [holder for holder in self._looked if holder[:2] not in blocks]:
            del self._looked[holder]

    def check(self, holder: WorkerRank, index: KvIndex) -> bool:
        """Return whether a rank claims no more blocks than it can hold.

        The check is cheap until the rank claims many more blocks than at the last count.
        """
        held, key = index.count(holder), (holder.worker, holder.instance)
        most = self._blocks.get(key, 0) * SLACK + SLACK_BLOCKS
        if held <= self._looked.get(holder, most):
            return True
        on_device = sum(len(blocks) for tier, _, blocks in index.held(holder) if tier == kv.Tier.DEVICE)
        self._looked[holder] = held * LOOK_AGAIN
        if on_device <= most and held <= most * TIERED_MAX:
            return True
        self._lose(key, f"claim {on_device} KV blocks, and it has registered {self._blocks.get(key, 0)}")
        return False

    def compare(self, key: Key, claimed: int, cached: int) -> None:
        """Compare the cached tokens that a worker claimed for a prompt with those that the answer reported."""
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
    """The completeness of the index: the numbers of ranks, of complete ranks, and of blocks."""

    ranks: int  # ranks that report their blocks
    complete: int  # ranks of which all known events were applied
    blocks: int  # distinct blocks, over all ranks

    def __str__(self) -> str:
        return f"{self.blocks} blocks of {self.complete} of {self.ranks} ranks"


class KvView:
    """The KV index of one frontend, and the feeds that update the index. One task owns this object."""

    def __init__(self, dice: Callable[[], float] = random) -> None:
        self.index = KvIndex()
        self.find = self.index.find  # returns the leading blocks of a prompt that each rank has
        self.counts = Counts()
        self._dice = dice
        self._joined: list[WorkerJoined] = []
        self._feeds: dict[WorkerRank, Feed] = {}
        self.claims = KvClaims()
        # a heap of (time, number, rank); an entry remains if its rank was queried earlier or is gone
        self._due: list[tuple[float, int, WorkerRank]] = []
        self._turn = count()

    def absorb(self, joined: Iterable[WorkerJoined], now: float) -> None:
        """Follow the ranks of the live workers (`joined`) that publish KV events. Drop all other ranks.

        The call is cheap if no worker has joined or left.
        """
        joined = list(joined)
        if len(joined) == len(self._joined) and all(map(is_, joined, self._joined)):
            return
        self._joined = joined
        self.claims.set_workers({(w.worker, w.instance): w.profile.kv_blocks for w in joined if w.kv_events})
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
        """Compare the cached tokens that a rank claimed for a prompt with those that the answer reported."""
        key = (holder.worker, holder.instance)
        self.claims.compare(key, claimed, cached)
        if key in self.claims.disbelieved:
            self._disbelieve(key)

    def _disbelieve(self, key: Key) -> None:
        """Stop following the ranks of an instance, and drop their blocks."""
        for holder in [holder for holder in self._feeds if holder[:2] == key]:
            del self._feeds[holder]
            self.index.forget(holder)

    def complete(self, holder: WorkerRank) -> bool:
        """Return whether all events of a rank that are known to exist were applied."""
        feed = self._feeds.get(holder)
        return feed is not None and feed.complete

    @property
    def health(self) -> KvHealth:
        """How complete the index is now."""
        complete = sum(feed.complete for feed in self._feeds.values())
        return KvHealth(len(self._feeds), complete, len(self.index))

    # --- messages from workers

    def take(self, batch: kv.KvBatch, now: float) -> None:
        """Apply a live KV-event batch of a worker. A batch of a rank that is not followed is dropped."""
        holder = WorkerRank(batch.worker, batch.instance, batch.rank)
        feed = self._feeds.get(holder)
        if feed is not None:
            self._apply(holder, feed, feed.take(batch, now))

    def answer(self, holder: WorkerRank, ask: kv.KvRequest, answer: kv.Answer | None, now: float) -> None:
        """Apply `answer`, a worker's response to the KV request `ask`; None if no response came in time."""
        feed = self._feeds.get(holder)
        if feed is not None:
            self._apply(holder, feed, feed.answer(ask, answer, now))

    # --- requests to workers

    def due(self, now: float) -> tuple[WorkerRank, kv.KvRequest] | None:
        """Return a request that is due, with its rank, or None if none is due.

        The caller must pass the response to `answer`.
        """
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
        """Time at which to call `due` next; inf if no request is due before a message arrives."""
        return self._due[0][0] if self._due else inf

    def doubt(self, now: float) -> None:
        """Query all ranks within DOUBT_S, because events may have been lost without notice."""
        for holder, feed in self._feeds.items():
            feed.doubt(now + self._dice() * DOUBT_S)
            self._note(holder, feed)

    def _note(self, holder: WorkerRank, feed: Feed) -> None:
        if feed.due is not None and (feed.noted is None or feed.due < feed.noted):
            feed.noted = feed.due
            heappush(self._due, (feed.due, next(self._turn), holder))

    # --- the index

    def _apply(self, holder: WorkerRank, feed: Feed, events: Sequence[kv.KvEvent]) -> None:
        for event in events:
            if event is CLEARED:
                self.index.forget(holder)
                continue
            kind, status = apply(self.index, holder, event)
            self.counts.applied[kind, status] = self.counts.applied.get((kind, status), 0) + 1
        if events and not self.claims.check(holder, self.index):
            self._disbelieve((holder.worker, holder.instance))
        else:
            self._note(holder, feed)


def apply(index: KvIndex, holder: WorkerRank, event: kv.KvEvent) -> tuple[str, str]:
    """Apply one event to the index. Return the event's kind and the result, as counted in the metrics.

    The result is `ok`, `parent_block_not_found`, `block_not_found`, or `invalid_block` (a block at two depths, or an
    unknown tier).
    """
    if isinstance(event, kv.Cleared):
        index.forget(holder)
        return "cleared", "ok"
    kind = "stored" if isinstance(event, kv.Stored) else "removed"
    try:
        tier = kv.Tier(event.tier)
        if isinstance(event, kv.Stored):
            index.store(holder, event.parent, event.blocks, tier)
        elif index.remove(holder, event.blocks, tier):
            return kind, "block_not_found"
    except ParentNotHeld:
        return kind, "parent_block_not_found"
    except ValueError:  # `Misplaced` is one
        return kind, "invalid_block"
    return kind, "ok"
