"""In which order are facts folded? Not in stream order.

A decision says how far its controller had read (`through`). Observations can enter the stream between that read and
the append, so stream order is not absorption order. Whoever folds keeps two states:

    settled = the fold of everything up to the last decision's `through`, and of every decision
    pending = the observations after it
    shown   = fold(settled, pending)

When a decision arrives, what its `through` covers moves from pending to settled, the decision is applied, and the
rest of pending is folded again on top. Folding raw stream order instead gives a wrong state in about one history in
eight (a test shows it).

What is no event of ours (`Skipped`) only takes its place: it is neither settled nor pending. On a decision's subject it has
moved the fence, so the position moves with it. Only a reader that goes on at unknown decisions meets one (`StopsAt`): the
decision has taken a number, or none if it is quarantined later, and the fold lacks what it says.

Repetitions are dropped here: a fact whose number is not above its source's last has been folded already.

A worker's fact that names a source which is not its own (`events.intrusion.source_rule`) is folded, for its subject proves
whose it is. It counts for no source: it is no repetition, and nothing that the named source publishes becomes one.

Every process instance is a source, so what is remembered of them must end. A source from which nothing new has come
for `REMEMBERED` of the stream's time is forgotten. That loses no guarantee: a sender never repeats a fact later than
half of that after it was said (`events.journal.publisher`), and the other half is for clocks that disagree. Whether a
source is forgotten follows from the stream's times of its own two facts alone, so it does not matter from which
snapshot somebody has read.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from events.errors import QUARANTINE, HoldfastError
from events.fact import Decision, Recorded, Skipped
from events.frozen import quickly_made, replace
from events.intrusion.source_rule import forged

REMEMBERED = timedelta(days=14)  # how long a source may be silent before it is forgotten
CLOCK_SLACK = timedelta(days=1)  # the broker's clock may be set back by so much
Last = tuple[int, datetime]  # a source's last number, and the stream's time of that fact

S = TypeVar("S")


class OutOfOrder(HoldfastError):
    """The journal's numbers do not follow one another: it was truncated, recreated, or tampered with."""


class OutOfTurn(OutOfOrder):
    """A decision has not the number that is next: no controller wrote it, or the journal was truncated or recreated."""


@quickly_made
@dataclass(frozen=True, slots=True)
class Position:
    """How far a settled state reaches: observations up to `through`, what lies on decisions' subjects up to stream sequence
    `decided`.

    Reading on from a snapshot starts after `through`; decisions not above `decided` are skipped then.
    """

    through: int = 0
    decided: int = 0
    number: int = 0  # of the last decision


@dataclass(slots=True)
class Order(Generic[S]):
    """The fold of a journal in absorption order. Feed it every recorded event, in stream order, from `position`."""

    evolve: Callable[[S, Recorded], S]
    settled: S
    position: Position = Position()
    sources: dict[str, Last] = field(default_factory=dict)  # of each source, settled
    last_seq: int = field(init=False)  # of the last event seen, whether folded or dropped
    lacks: int = field(init=False, default=0)  # decisions of unknown kinds that were skipped
    pending: deque[Recorded] = field(init=False, default_factory=deque)
    _shown: S = field(init=False)  # lacks `_fresh`: who reads many events at once asks only after the last
    _fresh: list[Recorded] = field(init=False, default_factory=list)
    _seen: dict[str, Last] = field(init=False)  # of each source, pending included
    _unread: int = field(init=False, default=0)  # decisions of unknown kinds since the last known one
    _forgot: int = field(init=False, default=0)  # the day on which silent sources were looked for last

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
        """Take one event in and return the shown state. Raise OutOfOrder on a gap, OutOfTurn at a decision out of turn."""
        self.take(event)
        return self.shown

    def take(self, event: Recorded) -> None:
        """Take one event in; fold it when somebody asks. Raise OutOfOrder on a gap, OutOfTurn at a decision out of turn: then
        nothing has changed, and the fold can go on once that place is quarantined."""
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
        self.last_seq = event.seq  # not before: whoever goes on after an OutOfTurn reads the same event again

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
                "wrote it, or the journal was truncated or recreated. `holdfast journal inspect` lists every such place; "
                f"`{QUARANTINE} {event.seq} --why TEXT` has everybody step over this one."
            )
        self._unread = 0
        self._settle(event.through)
        self.settled = self.evolve(self.settled, event)
        through = max(self.position.through, event.through)
        self.position = Position(through, event.seq, decision.number)
        self._shown, self._fresh = self.settled, list(self.pending)

    def _settle(self, through: int) -> None:
        """Move what `through` covers from pending to settled."""
        at = None  # the stream's time of the last that moves
        if self.pending and self.pending[-1].seq <= through:  # all of it, mostly: then it is folded already
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
        """Drop the sources that nobody will ask for any more: whoever reads on from here reads nothing older."""
        self._forgot = at.toordinal()
        for sources in (self.sources, self._seen):
            for source in [s for s, last in sources.items() if at - last[1] > REMEMBERED + CLOCK_SLACK]:
                del sources[source]
