"""The KV event feed of one rank: orders its events, detects gaps, and requests what is missing.

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
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from events.kv import Answer, Cleared, Dump, Events, KvBatch, KvEvent, KvRefused, KvRequest, TooNew

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


class Feed:
    """The feed of one rank of a worker instance. `due`: when to send the next request; None: not now."""

    __slots__ = (
        "_ahead", "_asked", "_counts", "_dump", "_gap", "_tries", "_weight", "due", "next", "noted",
        "rank", "seen",
    )  # fmt: skip

    def __init__(self, rank: int, counts: Counts, due: float) -> None:
        self.rank = rank
        self.due: float | None = due
        self.noted: float | None = None  # set by the caller: when it will check `due`
        self.next: int | None = None  # the id of the next event; None: restoring
        self.seen = 0  # one past the highest event id known to exist
        self._counts = counts
        self._asked: KvRequest | None = None  # the request in flight
        self._dump: tuple[int, int] | None = None  # the dump being applied, and its next part
        self._ahead: dict[int, Sequence[KvEvent]] = {}  # buffered events, by the id of the first
        self._weight = 0  # of `_ahead`
        self._tries = 0  # consecutive failed requests
        self._gap = False

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
