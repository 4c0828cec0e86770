"""One rank's KV events: which come next, what is missing, and what to ask for it.

    restoring ──── a dump, whole ────▶ following ──── an event beyond the next ────▶ catching up
       ▲    └── event 0, or cleared ──▶    ▲                                          │  │
       │                                   └───────────── nothing is missing ─────────┘  │
       └────────────────────── the worker knows nothing of these ids ────────────────────┘

    live batch   ids below `next` are dropped, those from it on applied, those beyond are kept until what is missing has come
    cleared      a fresh start: the rank holds nothing, whatever was missed before. Event 0 is one, too
    events       must reach back to `next`; a dump replaces everything, part by part

What is to be applied is returned as events; `Cleared` among them means that the rank holds nothing now. Only the answer to
the last question counts: one that was overtaken by a fresh start, or by what was missing, is dropped. No rank is ever given
up: what is missing is asked for again, less and less often. What does not fit into the buffer is asked for with the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from events.kv import Answer, Cleared, Dump, Events, KvBatch, KvEvent, KvRefused, KvRequest, TooNew

AHEAD_MAX = 65_536  # blocks, and events, that wait for what is missing before them
RETRY_S = 0.2
RETRIES_MAX = 6  # doublings of it: 12.8 s at most
CLEARED = Cleared()  # that no worker has said: what follows it replaces everything


@dataclass(slots=True)
class Counts:
    """What the feeds of a frontend have seen so far."""

    applied: dict[tuple[str, str], int] = field(default_factory=dict)  # events by kind and how it went
    gaps: int = 0  # times that events turned out to be missing
    recovered: int = 0  # gaps that were closed
    restored: int = 0  # dumps that were taken in
    failed: int = 0  # questions without a useful answer


class Feed:
    """One rank of one life of a worker, for as long as it lives. `due` is when to ask next; None: not now."""

    __slots__ = (
        "_ahead", "_asked", "_counts", "_dump", "_gap", "_tries", "_weight", "due", "next", "noted",
        "rank", "seen",
    )  # fmt: skip

    def __init__(self, rank: int, counts: Counts, due: float) -> None:
        self.rank = rank
        self.due: float | None = due
        self.noted: float | None = None  # the caller's own: when it means to look at `due`
        self.next: int | None = None  # the id of the next event; None: restoring
        self.seen = 0  # the id after the last event that is known to exist
        self._counts = counts
        self._asked: KvRequest | None = None  # the question that is on its way
        self._dump: tuple[int, int] | None = None  # the dump that is being taken in, and its next part
        self._ahead: dict[int, Sequence[KvEvent]] = {}  # by the id of the first
        self._weight = 0  # of `_ahead`
        self._tries = 0  # in a row, without success
        self._gap = False

    @property
    def complete(self) -> bool:
        """Whether all events that are known to exist were taken in."""
        return self.next is not None and self.seen <= self.next

    def take(self, batch: KvBatch, now: float) -> Sequence[KvEvent]:
        """Take in what the worker said unasked. Return what is to be applied."""
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
        """Return from which event of a batch on nothing before it matters; None if there is none."""
        for place in range(len(events) - 1, -1, -1):
            if isinstance(events[place], Cleared) and first + place >= (self.next or 0):
                return place + 1
        return 0 if self.next is None and first == 0 else None

    def doubt(self, due: float) -> None:
        """Ask then, even if nothing seems to be missing, unless that has turned out until then."""
        if self._asked is None:
            self.due = due

    def ask(self) -> KvRequest:
        """Return what is to be asked now. `answer` must follow."""
        self.due = None
        if self._dump is not None:
            self._asked = KvRequest(self.rank, dump=self._dump[0], part=self._dump[1])
        else:
            self._asked = KvRequest(self.rank, first=self.next)
        return self._asked

    def answer(self, ask: KvRequest, answer: Answer | None, now: float) -> Sequence[KvEvent]:
        """Take in what came back; None: nothing did. Return what is to be applied."""
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
            case TooNew(next=newest) if newest == self.next:  # what seemed to be missing does not exist
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
        """Go on after a useful answer: with what was kept, and with what is missing still."""
        self._tries, self.due = 0, now  # until it is known that nothing is
        return self._settled(new, now)

    def _settled(self, new: list[KvEvent], now: float) -> Sequence[KvEvent]:
        """Add what was kept and comes next by now. See whether something is missing."""
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
