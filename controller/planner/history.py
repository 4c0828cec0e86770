"""Collects one model's traffic, capacity and scaling changes from the events of the journal.

Each frontend reports its traffic every minute. A minute's traffic is known only if all expected frontends have reported that
minute, because the sum must not lack the traffic of a failed frontend. A frontend is expected if it has reported one of the
three preceding minutes. A frontend that stops marks its last report, and is no longer expected.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from controller.planner.plan import Change
from controller.planner.sizing import BIN_S, Minute, Seen, Traffic
from events.fact import Recorded
from events.observations import CapacityReported, ScaleApplied, ScaleProposed, ScaleSet, TrafficReported

DAYS = 7  # days of history kept
MINUTES_MAX = DAYS * 24 * 60
AHEAD_MAX = 60  # minutes; reports from a clock further ahead of the stream's are ignored
EXPECTED_FOR = 3  # minutes after its last report for which a frontend's report is awaited
SETTLED_AFTER = 5  # minutes after which a minute is final
LATE_S = 10.0  # time after a minute's end for reports to arrive
CAPACITIES_MAX = 4096
PROPOSALS_MAX = 256


@dataclass(slots=True)
class _MinuteReports:
    """The sum of the frontends' reports for one minute."""

    traffic: Traffic = field(default_factory=Traffic)
    late: int = 0
    frontends: set[str] = field(default_factory=set)
    lives: set[str] = field(default_factory=set)  # their process instances
    stopped: set[str] = field(default_factory=set)  # frontends for which this was the last minute


class ModelHistory:
    """The history of one model. Events must be passed in the journal's order."""

    def __init__(self, model: str) -> None:
        """Create an empty history."""
        self.model = model
        self._minutes: dict[int, _MinuteReports] = {}  # by minute number since the epoch
        self._settled: dict[int, Seen] = {}  # final values of past minutes
        self._capacities: list[tuple[float, int]] = []  # time and number of serving workers
        self._proposals: list[Recorded] = []
        self._average = Traffic(1.0)  # mean of the last requests: rejected ones are assumed to be like them
        self.last_capacity: Recorded | None = None
        self.last_applied: Recorded | None = None
        self.set_by_operator: int | None = None

    def take(self, event: Recorded) -> None:
        """Add one event about this model to the history."""
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
        reports = self._minutes.setdefault(number, _MinuteReports())
        if event.source in reports.lives:
            return
        reports.lives.add(event.source)
        reports.frontends.add(fact.frontend)
        if fact.last:
            reports.stopped.add(fact.frontend)
        else:
            reports.stopped.discard(fact.frontend)  # it was started again
        total = Traffic(fact.requests, fact.prompt_tokens, fact.prompt_tokens_squared, fact.output_tokens)
        if fact.requests:
            self._average = total.times(1 / fact.requests)
        reports.traffic = reports.traffic.plus(total).plus(self._average.times(fact.rejected))
        reports.late += fact.late
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
        """The latest proposal, from any planner."""
        return self._proposals[-1] if self._proposals else None

    def carried_out(self, proposal: Recorded) -> bool:
        """Return whether the last ScaleApplied reports that this proposal was applied successfully."""
        applied = self.last_applied.fact if self.last_applied is not None else None
        return isinstance(applied, ScaleApplied) and applied.proposal == proposal.id and applied.ok

    def minutes(self, now: datetime) -> list[Seen]:
        """Return the traffic, late answers and workers of each past minute, the latest last.

        A minute with unknown traffic is None.
        """
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
        reports = self._minutes.get(number)
        if reports is None or self._expected(number) - reports.frontends:
            return None
        return Minute(reports.traffic, reports.late, self._served(number))

    def _expected(self, number: int) -> set[str]:
        """Return the frontends that must report the minute `number` before its traffic is known."""
        expected: set[str] = set()
        for before in range(number - EXPECTED_FOR, number):
            if (reports := self._minutes.get(before)) is not None:
                expected = (expected | reports.frontends) - reports.stopped
        return expected

    def _served(self, number: int) -> float:
        """Return the time-weighted mean number of serving workers in a minute; 0 without a capacity report."""
        begin, end = number * BIN_S, (number + 1) * BIN_S
        place = bisect_right(self._capacities, (begin, 1 << 30)) - 1
        within = self._capacities[max(0, place) : bisect_left(self._capacities, (end, -1))]
        if not within:
            return 0.0
        spans = [(max(begin, at), healthy) for at, healthy in within]
        ends = [*(at for at, _ in spans[1:]), end]
        covered = end - spans[0][0]
        worked = sum(healthy * (until - at) for (at, healthy), until in zip(spans, ends, strict=True))
        return worked / covered if covered > 0 else 0.0

    def changes(self, now: datetime, within: timedelta = timedelta(hours=1)) -> Sequence[Change]:
        """Return the changes that were proposed in the period `within` before `now`, the latest last."""
        return tuple(
            Change(event.at, event.fact.before, event.fact.after)
            for event in self._proposals
            if isinstance(event.fact, ScaleProposed) and now - event.at < within
        )


def _number(at: datetime) -> int:
    return int(at.timestamp() // BIN_S)
