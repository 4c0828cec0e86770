"""What do the events that are planned by tell of one model: what came, what could carry it, what was changed and wanted?

A minute is known where every frontend has told of it that told of one of the three minutes before: a frontend that falls takes
its share of the traffic with it, and what the others tell is not all that came. One that stops says so.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from controller.planner.plan import Change
from controller.planner.traffic import BIN_S, Minute, Seen, Traffic
from events.fact import Recorded
from events.observations import CapacityReported, ScaleApplied, ScaleProposed, ScaleSet, TrafficReported

DAYS = 7  # that are remembered
MINUTES_MAX = DAYS * 24 * 60
AHEAD_MAX = 60  # minutes: a frontend whose clock is further ahead of the stream's is not believed
EXPECTED_FOR = 3  # minutes after its last one for which a frontend's word is waited for
SETTLED_AFTER = 5  # minutes
LATE_S = 10.0  # after a minute's end, until all who tell of it have been heard
CAPACITIES_MAX = 4096
PROPOSALS_MAX = 256


@dataclass(slots=True)
class _Told:
    """One minute."""

    traffic: Traffic = field(default_factory=Traffic)
    late: int = 0
    frontends: set[str] = field(default_factory=set)
    lives: set[str] = field(default_factory=set)  # of them
    stopped: set[str] = field(default_factory=set)  # of them: this was their last


class ModelHistory:
    """One model. Events are taken in the journal's order."""

    def __init__(self, model: str) -> None:
        """Begin with nothing."""
        self.model = model
        self._minutes: dict[int, _Told] = {}  # by its number since the epoch
        self._settled: dict[int, Seen] = {}  # what is known of those that are long over
        self._capacities: list[tuple[float, int]] = []  # when, and how many served
        self._proposals: list[Recorded] = []
        self._usual = Traffic(1.0)  # a request as the last ones were: the rejected are taken to be like them
        self.last_capacity: Recorded | None = None
        self.last_applied: Recorded | None = None
        self.set_by_operator: int | None = None

    def take(self, event: Recorded) -> None:
        """Absorb one event about this model."""
        match event.fact:
            case TrafficReported() as fact:
                self._traffic(fact, event)
            case CapacityReported(healthy=healthy):
                self.last_capacity = event
                insort(self._capacities, (event.at.timestamp(), healthy))
                del self._capacities[:-CAPACITIES_MAX]
            case ScaleProposed():
                if all(known.seq != event.seq for known in self._proposals):
                    self._proposals = sorted((*self._proposals, event), key=lambda one: one.seq)
                    del self._proposals[:-PROPOSALS_MAX]
            case ScaleApplied():
                self.last_applied = event
            case ScaleSet(workers=workers):
                self.set_by_operator = workers

    def _traffic(self, fact: TrafficReported, event: Recorded) -> None:
        number, newest = _number(fact.minute), _number(event.at)
        if not newest - MINUTES_MAX <= number <= newest + AHEAD_MAX:
            return
        told = self._minutes.setdefault(number, _Told())
        if event.source in told.lives:
            return
        told.lives.add(event.source)
        told.frontends.add(fact.frontend)
        if fact.last:
            told.stopped.add(fact.frontend)
        else:
            told.stopped.discard(fact.frontend)  # it has been started again
        came = Traffic(fact.requests, fact.prompt_tokens, fact.prompt_tokens_squared, fact.output_tokens)
        if fact.requests:
            self._usual = came.times(1 / fact.requests)
        told.traffic = told.traffic + came + self._usual.times(fact.rejected)
        told.late += fact.late
        for later in range(number, number + EXPECTED_FOR + 1):
            self._settled.pop(later, None)
        if len(self._minutes) > MINUTES_MAX + AHEAD_MAX:
            self._forget(newest - MINUTES_MAX)

    def _forget(self, before: int) -> None:
        for known in (self._minutes, self._settled):
            for number in [number for number in known if number < before]:
                del known[number]

    @property
    def last_proposal(self) -> Recorded | None:
        """The latest proposal, whoever made it."""
        return self._proposals[-1] if self._proposals else None

    def carried_out(self, proposal: Recorded) -> bool:
        """Return whether somebody has told that he has carried this proposal out."""
        told = self.last_applied.fact if self.last_applied is not None else None
        return isinstance(told, ScaleApplied) and told.proposal == proposal.id and told.ok

    def minutes(self, now: datetime) -> list[Seen]:
        """Return what is known of each minute that is over, the latest last."""
        if not self._minutes:
            return []
        last = _number(now - timedelta(seconds=LATE_S)) - 1
        first = max(min(self._minutes), last - MINUTES_MAX + 1)
        found = []
        for number in range(first, last + 1):
            if number in self._settled:
                found.append(self._settled[number])
                continue
            found.append(self._seen(number))
            if number <= last - SETTLED_AFTER:
                self._settled[number] = found[-1]
        return found

    def _seen(self, number: int) -> Seen:
        told = self._minutes.get(number)
        if told is None or self._expected(number) - told.frontends:
            return None
        return Minute(told.traffic, told.late, self._served(number))

    def _expected(self, number: int) -> set[str]:
        """Return who should have told of a minute."""
        expected: set[str] = set()
        for before in range(number - EXPECTED_FOR, number):
            if (told := self._minutes.get(before)) is not None:
                expected = (expected | told.frontends) - told.stopped
        return expected

    def _served(self, number: int) -> float:
        """Return how many workers served within a minute, on average; 0: nobody has told."""
        begin, end = number * BIN_S, (number + 1) * BIN_S
        place = bisect_right(self._capacities, (begin, 1 << 30)) - 1
        within = self._capacities[max(0, place) : bisect_left(self._capacities, (end, -1))]
        if not within:
            return 0.0
        spans = [(max(begin, at), healthy) for at, healthy in within]
        ends = [*(at for at, _ in spans[1:]), end]
        covered = end - spans[0][0]
        lasting = zip(spans, ends, strict=True)
        return (
            sum(healthy * (until - at) for (at, healthy), until in lasting) / covered if covered > 0 else 0.0
        )

    def changes(self, now: datetime, within: timedelta = timedelta(hours=1)) -> Sequence[Change]:
        """Return the changes that were proposed lately, the latest last."""
        return tuple(
            Change(event.at, event.fact.before, event.fact.after)
            for event in self._proposals
            if isinstance(event.fact, ScaleProposed) and now - event.at < within
        )


def _number(at: datetime) -> int:
    return int(at.timestamp() // BIN_S)
