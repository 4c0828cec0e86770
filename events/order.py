"""The order in which facts are folded ("absorption order"), which differs from stream order.

A decision records how far its controller had read (`through`). Observations can enter the stream between that read and the
append, so they come before the decision in the stream, although the decision does not consider them. Every fold keeps two states:

    settled = the fold of everything up to the last decision's `through`, and of every decision
    pending = the observations after it
    shown   = fold(settled, pending)

When a decision arrives, the events that its `through` covers move from pending to settled, the decision is applied, and the
rest of pending is folded again on top. Folding raw stream order instead gives a wrong state in about one history in
eight (a test shows it).

A message that is not an event of Holdfast (`Skipped`) only occupies its position: it is neither settled nor pending. On a
decision's subject it has moved the fence, so `Position.decided` moves, too. Only a reader that continues past unknown decisions
(`StopsAt`) receives one. Such a decision has used a number (none, if it is quarantined later), and the fold lacks its content.

Duplicates are dropped here: a fact with a number not above its source's last one has been folded already.

A worker's fact can name a source that is not its own (`events.intrusion.source_rule`). It is folded, because its subject proves
which worker published it. But it is ignored in the detection of duplicates: it is never one, and does not advance the named
source's last number.

Every process instance is a source, so the memory of sources must be bounded. A source is forgotten after `REMEMBERED` of the
stream's time without a new fact. That loses no guarantee: a sender never repeats a fact later than half of that after it was
first published (`events.journal.publisher`), and the other half allows for clocks that disagree. Whether a source is forgotten
follows from the stream's times of its own two facts alone, so it does not depend on the snapshot a reader started from.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from events.errors import QUARANTINE, HoldfastError
from events.fact import Decision, Recorded, Skipped
from events.frozen import fast_constructor, replace
from events.intrusion.source_rule import forged

REMEMBERED = timedelta(days=14)  # how long a source may be silent before it is forgotten
CLOCK_SLACK = timedelta(days=1)  # by how much the broker's clock may be set back
Last = tuple[int, datetime]  # a source's last number, and the stream's time of that fact

S = TypeVar("S")


class OutOfOrder(HoldfastError):
    """The journal's numbers are not consecutive: it was truncated, recreated, or tampered with."""


class OutOfTurn(OutOfOrder):
    """A decision's number is not the next one: no controller wrote it, or the journal was truncated or recreated."""


@fast_constructor
@dataclass(frozen=True, slots=True)
class Position:
    """How far a settled state reaches: observations up to `through`, and decisions' subjects up to stream sequence `decided`.

    Reading from a snapshot starts after `through`; decisions not above `decided` are skipped then.
    """

    through: int = 0
    decided: int = 0
    number: int = 0  # of the last decision


@dataclass(slots=True)
class Order(Generic[S]):
    """Folds a journal in absorption order. Feed it every recorded event, in stream order, from `position`."""

    evolve: Callable[[S, Recorded], S]
    settled: S
    position: Position = Position()
    sources: dict[str, Last] = field(default_factory=dict)  # of each source, settled
    last_seq: int = field(init=False)  # of the last event seen, whether folded or dropped
    lacks: int = field(init=False, default=0)  # decisions of unknown kinds that were skipped
    pending: deque[Recorded] = field(init=False, default_factory=deque)
    _shown: S = field(init=False)  # without `_fresh`, which is folded only when `shown` is read
    _fresh: list[Recorded] = field(init=False, default_factory=list)
    _seen: dict[str, Last] = field(init=False)  # of each source, pending included
    _unread: int = field(init=False, default=0)  # decisions of unknown kinds since the last known one
    _forgot: int = field(init=False, default=0)  # ordinal day of the last search for silent sources

    def __post_init__(self) -> None:
        self.last_seq = self.position.through
        self._shown = self.settled
        self._seen = dict(self.sources)

    @property
    def shown(self) -> S:
        """The fold of everything seen: settled, then pending."""
        if self._fresh:
            for event in self._fresh:
                self._shown = self.evolve(self._shown, event)
            self._fresh.clear()
        return self._shown

    def absorb(self, event: Recorded) -> S:
        """Add one event and return the shown state. Raise OutOfOrder on a gap, OutOfTurn on a decision out of turn."""
        self.take(event)
        return self.shown

    def take(self, event: Recorded) -> None:
        """Add one event, which is folded on demand. Raise OutOfOrder on a gap. Raise OutOfTurn on a decision out of turn: the
        state is unchanged then, and the fold can continue once that event is quarantined."""
        if event.seq != self.last_seq + 1 and self.last_seq:
            raise OutOfOrder(f"event {event.seq} follows {self.last_seq}: {OutOfOrder.__doc__}")
        if isinstance(event.fact, Decision):
            if event.seq > self.position.decided:
                self._decide(event, event.fact)
        else:
            own = (
                event
                if not event.source or not forged(event.fact, event.source)
                else replace(event, source="")
            )
            if self._is_new(own):
                self.pending.append(own)
                self._fresh.append(own)
        # last: after an OutOfTurn a reader that continues reads the same event again
        self.last_seq = event.seq

    def _is_new(self, event: Recorded) -> bool:
        if not event.source or event.source_number <= 0:
            return not self._steps_over(event)
        last = self._seen.get(event.source)
        if last is not None and event.source_number <= last[0] and event.at - last[1] <= REMEMBERED:
            return False
        self._seen[event.source] = (event.source_number, event.at)
        return True

    def _steps_over(self, event: Recorded) -> bool:
        fact = event.fact
        if isinstance(fact, Skipped) and fact.decided and event.seq > self.position.decided:
            self.position = replace(self.position, decided=event.seq)
            self.lacks += fact.unknown
            self._unread += fact.unknown
        return isinstance(fact, Skipped)

    def _decide(self, event: Recorded, decision: Decision) -> None:
        if not self.position.number < decision.number <= self.position.number + 1 + self._unread:
            raise OutOfTurn(
                f"decision {decision.number}, at {event.seq}, is out of turn, {self.position.number + 1} is next: no controller "
                "wrote it, or the journal was truncated or recreated. `holdfast journal inspect` lists every such event; "
                f"`{QUARANTINE} {event.seq} --why TEXT` makes all readers skip this one."
            )
        self._unread = 0
        self._settle(event.through)
        self.settled = self.evolve(self.settled, event)
        through = max(self.position.through, event.through)
        self.position = Position(through, event.seq, decision.number)
        self._shown, self._fresh = self.settled, list(self.pending)

    def _settle(self, through: int) -> None:
        """Move the events up to `through` from pending to settled."""
        at = None  # the stream's time of the last event that moves
        # usually all pending events, and their fold exists already
        if self.pending and self.pending[-1].seq <= through:
            self.settled, at = self.shown, self.pending[-1].at
            for event in self.pending:
                if event.source:
                    self.sources[event.source] = (event.source_number, event.at)
            self.pending.clear()
        while self.pending and self.pending[0].seq <= through:
            first = self.pending.popleft()
            at = first.at
            if first.source:
                self.sources[first.source] = (first.source_number, first.at)
            self.settled = self.evolve(self.settled, first)
        if at is not None and at.toordinal() != self._forgot:
            self._forget_silent(at)

    def _forget_silent(self, at: datetime) -> None:
        """Drop the sources that are not needed any more: a reader that starts from here reads nothing older."""
        self._forgot = at.toordinal()
        for sources in (self.sources, self._seen):
            for source in [s for s, last in sources.items() if at - last[1] > REMEMBERED + CLOCK_SLACK]:
                del sources[source]


@dataclass(slots=True)
class DecisionNumbering:
    """Counts decisions without folding them, to inspect a journal at which every reader stops. Feed it every event.

    A decision out of turn has not been folded, so the next one must have the number that was expected of it. A decision that only
    a newer version can know has used a number (none, once it is quarantined). Until a known decision follows, either may be next.
    """

    last: int | None = 0  # number of the last decision in turn; None: the stream no longer has its beginning
    unread: int = 0  # later decisions that only a newer version can know

    def expected(self, event: Recorded) -> int | None:
        """Add one event. Return the number that a decision out of turn should have had; None: it is in turn, or is no
        decision."""
        fact = event.fact
        if isinstance(fact, Skipped):
            self.unread += fact.unknown and fact.decided
        elif isinstance(fact, Decision):
            if self.last is not None and not self.last < fact.number <= self.last + 1 + self.unread:
                return self.last + 1
            self.last, self.unread = fact.number, 0
        return None
