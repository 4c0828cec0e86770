"""Computes ("folds") a state from the journal's facts, in an order that differs from the stream's.

A decision records how far its controller had read (`through`). Observations can enter the stream between that read and the
append of the decision. They come before the decision in the stream, although the controller did not consider them. So every
fold (each computation of a state) keeps two states and the events between them:

    settled = the fold of all observations up to the last decision's `through`, and of every decision
    pending = the later observations
    shown   = fold(settled, pending)

When a decision arrives, the events that its `through` covers move from pending to settled. Then the decision is applied to
settled, and the other pending events are folded again on top. This is called absorption order. A fold in the order of the stream
gives a wrong state in about one history in eight, as a test shows.

A message that is not an event of Holdfast (`Skipped`) only occupies its position, and is neither settled nor pending.
If such a message is on a decision's subject, `Position.decided` advances past the message, because the fence counts it, too.

At a decision of an unknown kind a reader stops, unless it is set to continue (`StopsAt`). A reader that continues receives a
`Skipped`, and its fold lacks the content of the decision. The unknown decision has taken one decision number. But if that
decision is quarantined later, it does not count, and the next decision takes the same number. So the fold accepts the next
decision with either number: that of the unknown decision, or the number after it.

The fold drops duplicates: a fact with a number that is not above its source's last number has been folded already.

A worker's fact can name a source that is not its own (`events.intrusion.source_rule`). The fact is folded, because its subject
proves which worker published it. But the detection of duplicates ignores the fact: the fact is never dropped as a duplicate, and
does not advance the last number of the named source.

Every process instance is a source, so the memory of sources must be bounded. A source is forgotten if the stream has no new fact
of it for 14 days (`REMEMBERED`). This loses no guarantee, because a sender repeats a fact for at most half of that time
(`events.journal.publisher`). The other half allows for clocks that disagree. Whether a source is forgotten depends only on the
stream's times of two consecutive facts of that source. So all readers get the same result, whichever snapshot they started from.
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
    """How much of the journal a settled state contains: observations up to the sequence `through`, and messages on decisions'
    subjects up to `decided`.

    A reader of a snapshot starts after `through`. The reader then skips the decisions up to `decided`, because the snapshot
    contains them.
    """

    through: int = 0
    decided: int = 0
    number: int = 0  # number of the last decision


@dataclass(slots=True)
class Order(Generic[S]):
    """Computes a state from a journal (folds it) in absorption order: a decision is applied before the observations that its
    controller had not read.

    The caller passes every recorded event, in stream order, from `position` on.
    """

    evolve: Callable[[S, Recorded], S]
    settled: S
    position: Position = Position()
    # last number of each source among the settled events
    sources: dict[str, Last] = field(default_factory=dict)
    last_seq: int = field(init=False)  # sequence of the last event, whether it was folded or dropped
    lacks: int = field(init=False, default=0)  # number of decisions of unknown kinds that were skipped
    pending: deque[Recorded] = field(init=False, default_factory=deque)
    # the shown state without the events in `_fresh`, which are folded when `shown` is read
    _shown: S = field(init=False)
    _fresh: list[Recorded] = field(init=False, default_factory=list)
    _seen: dict[str, Last] = field(init=False)  # last number of each source, pending events included
    # number of decisions of unknown kinds since the last known decision
    _unread: int = field(init=False, default=0)
    _forgot: int = field(init=False, default=0)  # ordinal day of the last search for silent sources

    def __post_init__(self) -> None:
        self.last_seq = self.position.through
        self._shown = self.settled
        self._seen = dict(self.sources)

    @property
    def shown(self) -> S:
        """The state after all events so far: the settled state, with the pending events applied to it."""
        if self._fresh:
            for event in self._fresh:
                self._shown = self.evolve(self._shown, event)
            self._fresh.clear()
        return self._shown

    def absorb(self, event: Recorded) -> S:
        """Add one event and return the shown state.

        Raise OutOfOrder if events before this event are missing. Raise OutOfTurn if this event is a decision and its number is
        not the next one.
        """
        self.take(event)
        return self.shown

    def take(self, event: Recorded) -> None:
        """Add one event. The event is applied to the state when `shown` is read.

        Raise OutOfOrder if events before this event are missing. Raise OutOfTurn if this event is a decision and its number is
        not the next one. After an OutOfTurn the state is unchanged, and the caller can continue once the event is quarantined.
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
        """Apply the pending events up to the sequence `through` to the settled state, and remove them from the pending ones."""
        at = None  # the stream's time of the last event that moves
        # usually all pending events move, and their fold exists already
        folded = bool(self.pending) and self.pending[-1].seq <= through
        if folded:
            self.settled = self.shown
        while self.pending and self.pending[0].seq <= through:
            first = self.pending.popleft()
            at = first.at
            if first.source:
                self.sources[first.source] = (first.source_number, first.at)
            if not folded:
                self.settled = self.evolve(self.settled, first)
        if at is not None and at.toordinal() != self._forgot:
            self._forget_silent(at)

    def _forget_silent(self, at: datetime) -> None:
        """Forget each source with no fact in the 15 days before `at`, because it no longer repeats a fact.

        The 15 days are the sum of `REMEMBERED` and `CLOCK_SLACK`.
        """
        self._forgot = at.toordinal()
        for sources in (self.sources, self._seen):
            for source in [s for s, last in sources.items() if at - last[1] > REMEMBERED + CLOCK_SLACK]:
                del sources[source]


@dataclass(slots=True)
class DecisionNumbering:
    """Checks the numbers of decisions without computing a state.

    A reader that computes the state stops at the first wrong number. This class finds every wrong number of a journal.

    The caller passes every event. A decision with a wrong number does not count: the expected number stays the same. A decision
    of an unknown kind has taken one number or, if it is quarantined later, none. So each of n decisions of unknown kinds adds 0
    or 1 to the number of the next known decision, and n+1 numbers are possible for that decision.
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
