"""Folds facts in "absorption order", which differs from the order of the stream.

A decision records how far its controller had read (`through`). Observations can enter the stream between that read and the
append of the decision. They come before the decision in the stream, although the controller did not consider them. So every
fold keeps two states:

    settled = the fold of all observations up to the last decision's `through`, and of every decision
    pending = the later observations
    shown   = fold(settled, pending)

When a decision arrives, the events that its `through` covers move from pending to settled. Then the decision is applied to
settled, and the other pending events are folded again on top. A fold in the order of the stream instead gives a wrong state in
about one history in eight, as a test shows.

A message that is not an event of Holdfast (`Skipped`) only occupies its position, and is neither settled nor pending. If the
message is on a decision's subject, the fence counts it, so `Position.decided` moves, too. Only a reader that continues past
unknown decisions (`StopsAt`) receives a `Skipped` for a decision of an unknown kind. Such a decision has used a number, unless
it is quarantined later, and the fold lacks its content.

The fold drops duplicates: a fact with a number that is not above its source's last number has been folded already.

A worker's fact can name a source that is not its own (`events.intrusion.source_rule`). The fact is folded, because its subject
proves which worker published it. But the detection of duplicates ignores the fact: it is never dropped as a duplicate, and does
not advance the last number of the named source.

Every process instance is a source, so the memory of sources must be bounded. A source is forgotten if the stream has no new
fact of it for `REMEMBERED`. This loses no guarantee, because a sender repeats a fact for at most half of that time
(`events.journal.publisher`). The other half allows for clocks that disagree. Whether a source is forgotten depends only on the
stream's times of the source's own two facts. So it does not depend on the snapshot from which a reader started.
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

REMEMBERED = timedelta(days=14)  # time without a new fact after which a source is forgotten
CLOCK_SLACK = timedelta(days=1)  # the broker's clock may be set back by this much
Last = tuple[int, datetime]  # a source's last number, and the stream's time of that fact

S = TypeVar("S")


class OutOfOrder(HoldfastError):
    """The journal's numbers are not consecutive: it was truncated, recreated, or tampered with."""


class OutOfTurn(OutOfOrder):
    """A decision's number is not the next one: no controller wrote it, or the journal was truncated or recreated."""


@fast_constructor
@dataclass(frozen=True, slots=True)
class Position:
    """How far a settled state reaches: observations up to the sequence `through`, and messages on decisions' subjects up to
    `decided`.

    A reader of a snapshot starts after `through`. It then skips the decisions up to `decided`, because the snapshot contains
    them.
    """

    through: int = 0
    decided: int = 0
    number: int = 0  # number of the last decision


@dataclass(slots=True)
class Order(Generic[S]):
    """Folds a journal in absorption order. The caller passes every recorded event, in stream order, from `position` on."""

    evolve: Callable[[S, Recorded], S]
    settled: S
    position: Position = Position()
    sources: dict[str, Last] = field(
        default_factory=dict
    )  # last number of each source among the settled events
    last_seq: int = field(init=False)  # sequence of the last event, whether it was folded or dropped
    lacks: int = field(init=False, default=0)  # number of decisions of unknown kinds that were skipped
    pending: deque[Recorded] = field(init=False, default_factory=deque)
    _shown: S = field(
        init=False
    )  # the shown state without the events in `_fresh`, which are folded when `shown` is read
    _fresh: list[Recorded] = field(init=False, default_factory=list)
    _seen: dict[str, Last] = field(init=False)  # last number of each source, pending events included
    _unread: int = field(
        init=False, default=0
    )  # number of decisions of unknown kinds since the last known decision
    _forgot: int = field(init=False, default=0)  # ordinal day of the last search for silent sources

    def __post_init__(self) -> None:
        self.last_seq = self.position.through
        self._shown = self.settled
        self._seen = dict(self.sources)

    @property
    def shown(self) -> S:
        """The fold of all events so far: of the settled ones, then of the pending ones."""
        if self._fresh:
            for event in self._fresh:
                self._shown = self.evolve(self._shown, event)
            self._fresh.clear()
        return self._shown

    def absorb(self, event: Recorded) -> S:
        """Add one event and return the shown state.

        Raise OutOfOrder if events are missing before it, OutOfTurn if it is a decision with a number that is not the next one.
        """
        self.take(event)
        return self.shown

    def take(self, event: Recorded) -> None:
        """Add one event, which is folded when `shown` is read.

        Raise OutOfOrder if events are missing before it, OutOfTurn if it is a decision with a number that is not the next one.
        After an OutOfTurn the state is unchanged, and the fold can continue once that event is quarantined.
        """
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
        # set last, because a reader that continues after an OutOfTurn reads the same event again
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
        """Move the events up to the sequence `through` from pending to settled."""
        at = None  # the stream's time of the last event that moves
        # usually all pending events move, and their fold exists already
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
        """Drop the sources that had no fact for so long before `at` that no repeated fact of theirs can arrive."""
        self._forgot = at.toordinal()
        for sources in (self.sources, self._seen):
            for source in [s for s, last in sources.items() if at - last[1] > REMEMBERED + CLOCK_SLACK]:
                del sources[source]


@dataclass(slots=True)
class DecisionNumbering:
    """Checks the numbers of decisions without folding them, to inspect a journal at which every reader stops. Takes every
    event.

    A decision with a wrong number has not been folded, so the next decision must have the number that was expected before. A
    decision of an unknown kind has used a number, unless it is quarantined. So until a decision of a known kind follows, either
    number may be next.
    """

    last: int | None = 0  # number of the last decision in turn; None: the stream no longer has its beginning
    unread: int = 0  # number of later decisions that only a newer version can know

    def expected(self, event: Recorded) -> int | None:
        """Add one event. Return the expected number if the event is a decision with a wrong number. Return None for any
        other event."""
        fact = event.fact
        if isinstance(fact, Skipped):
            self.unread += fact.unknown and fact.decided
        elif isinstance(fact, Decision):
            if self.last is not None and not self.last < fact.number <= self.last + 1 + self.unread:
                return self.last + 1
            self.last, self.unread = fact.number, 0
        return None
