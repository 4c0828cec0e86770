"""Reads a stretch (a range of events) of the journal into a compact form for what-if simulations.

Nearly all events of a journal are passed canaries, which do not change the fleet state. Several processes can therefore read one
stretch each (`reading`), while one process folds the remaining events in order (`recording`).
"""

from array import array
from collections import defaultdict
from dataclasses import dataclass, field

from events import observations as o
from events.errors import HoldfastError
from events.fact import Decision, Recorded

EVENTS_MAX = 5_000_000  # maximum number of events that one what-if question covers
# seconds after a worker's failed request in which its served requests may affect its breaker
SERVED_AFTER_S = 600.0

GOOD, SLOW, WRONG, MUTE = range(4)  # results of a canary: correct, correct but slow, wrong, no answer
WRONG_REASONS = ("token_mismatch", "logit_drift", "non_finite")
OF_THE_WORLD = (
    o.DeviceFaulted, o.DeviceRecovered, o.DrainFinished, o.DrainRequested, o.EngineFaulted, o.GoldenDisputed, o.GoldenProposed,
    o.GoldenRequested, o.RequestFailed, o.RequestPoisonous, o.ResumeRequested, o.ShutdownBegan, o.WorkerAwaited, o.WorkerHeard,
    o.WorkerJoined, o.WorkerLeft, o.WorkerSilent, o.WorkerSlow, o.WorkerSlowCleared,
)  # fmt: skip
TAKEN_IN_ORDER = (Decision, *OF_THE_WORLD)


class TooMuch(HoldfastError):
    """A what-if question covers a limited part of history: narrow it with --since and --until, or select an --incident."""


@dataclass(slots=True)
class RecordedCanaries:
    """The canary results of one worker instance, oldest first, as arrays with one element per result.

    Times are seconds since 1970."""

    worker: str
    instance: str
    at: "array[float]" = field(default_factory=lambda: array("d"))  # when the journal recorded the result
    # when the canary was sent: by the prober's clock, which `recording` corrects to the clock of the broker's stream
    sent: "array[float]" = field(default_factory=lambda: array("d"))
    said: bytearray = field(default_factory=bytearray)  # the result: GOOD, SLOW, WRONG or MUTE
    check: bytearray = field(default_factory=bytearray)  # index in CHECKS
    asked: "array[int]" = field(default_factory=lambda: array("H"))  # index in `names`
    # names of the canaries, in the order in which they were first sent
    names: list[str] = field(default_factory=list)
    # by index in the arrays: the facts of the canaries that failed or were slow
    facts: dict[int, o.CanaryFailed | o.CanarySlow] = field(default_factory=dict)
    # the first passed result, a template for estimated ones; None: no canary passed
    good: o.CanaryPassed | None = None
    end: float = float("inf")  # when the instance ended; infinity: not within the recording

    def __len__(self) -> int:
        return len(self.at)

    def add(self, later: "RecordedCanaries") -> None:
        """Append the canary results that a later range of the journal holds for the same worker instance."""
        place = len(self)
        self.names += [name for name in later.names if name not in self.names]
        indices = [self.names.index(name) for name in later.names]
        self.at += later.at
        self.sent += later.sent
        self.said += later.said
        self.check += later.check
        self.asked.extend(indices[one] for one in later.asked)
        self.facts |= {place + n: fact for n, fact in later.facts.items()}
        self.good = self.good or later.good


CHECKS: tuple[o.CheckType, ...] = ("scheduled", "confirm", "trial", "join")


@dataclass(slots=True)
class Adverse:
    """One observation that is evidence of a fault of a worker. `at` is in seconds since 1970."""

    at: float
    what: str


@dataclass(slots=True)
class StretchRead:
    """A range of the journal's events in compact form.

    Decisions up to the sequence number `decided` are left out, because the fleet state before the range contains them."""

    decided: int = 0
    events: int = 0
    # time of the first event in seconds since 1970, by the stream's clock; None: no event
    start: float | None = None
    end: float = 0.0  # time of the last event
    canaries: dict[tuple[str, str], RecordedCanaries] = field(default_factory=dict)  # by worker and instance
    # by worker and instance: the prober of each result
    askers: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    # by prober: seconds by which the stream's clock is ahead of the prober's clock, at most
    skew: dict[str, float] = field(default_factory=dict)
    # by worker: failed canaries
    wrong: dict[str, list[Adverse]] = field(default_factory=lambda: defaultdict(list))
    # by worker: times of RequestExposed
    exposed: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    # by worker: answers served, seconds counted
    served: dict[str, tuple[int, float]] = field(default_factory=dict)
    rest: list[Recorded] = field(default_factory=list)  # events that must be folded in order
    _failed_at: dict[str, float] = field(default_factory=dict)

    def take(self, event: Recorded) -> None:
        """Add the next event of the journal. Raise TooMuch if there are more than EVENTS_MAX events."""
        fact = event.fact
        if event.seq <= self.decided and isinstance(fact, Decision):
            return
        self._count(1)
        self.end = at = event.at.timestamp()
        if self.start is None:
            self.start = at
        if isinstance(fact, o.CanaryResult):
            self._canary(at, event.source, fact)
        elif isinstance(fact, o.RequestsServed):
            count, seconds = self.served.get(fact.worker, (0, 0.0))
            self.served[fact.worker] = (count + fact.count, seconds + fact.window_s)
            # a request may have failed before this stretch, so its first seconds count as after a failure
            failed_at = self._failed_at.get(fact.worker, self.start)
            if at - failed_at < SERVED_AFTER_S:
                self.rest.append(event)
        elif isinstance(fact, TAKEN_IN_ORDER):
            if isinstance(fact, o.RequestFailed):
                self._failed_at[fact.worker] = at
            self.rest.append(event)
        elif isinstance(fact, o.RequestExposed):
            self.exposed[fact.worker].append(at)

    def _count(self, more: int) -> None:
        self.events += more
        if self.events > EVENTS_MAX:
            raise TooMuch(f"more than {EVENTS_MAX:,} events. {TooMuch.__doc__}")

    def _canary(self, at: float, source: str, fact: o.CanaryResult) -> None:
        life = (fact.worker, fact.instance)
        recorded = self.canaries.get(life)
        if recorded is None:
            recorded, self.askers[life] = RecordedCanaries(*life), []
            self.canaries[life] = recorded
        place = len(recorded.at)
        recorded.at.append(at)
        recorded.sent.append(sent := fact.sent_at.timestamp())
        recorded.check.append(CHECKS.index(fact.check_type))
        if fact.canary not in recorded.names:
            recorded.names.append(fact.canary)
        recorded.asked.append(recorded.names.index(fact.canary))
        recorded.said.append(result := _result_of(fact))
        if isinstance(fact, o.CanaryPassed):
            recorded.good = recorded.good or fact
        elif isinstance(fact, o.CanaryFailed | o.CanarySlow):
            recorded.facts[place] = fact
        if isinstance(fact, o.CanaryFailed) and result in (WRONG, MUTE):
            self.wrong[fact.worker].append(Adverse(at, fact.reason))
        self.askers[life].append(source)
        late = at - sent - (fact.latency_ms / 1000 if result < WRONG else 0.0)
        self.skew[source] = min(self.skew.get(source, late), late)

    def add(self, later: "StretchRead") -> None:
        """Append the range of events that directly follows this one.

        The events in `later.rest` are not added, because the caller folds them. Raise TooMuch if the two ranges together have
        more than EVENTS_MAX events."""
        self._count(later.events)
        if later.start is not None:
            self.start, self.end = later.start if self.start is None else self.start, later.end
        for life, recorded in later.canaries.items():
            if life in self.canaries:
                self.canaries[life].add(recorded)
                self.askers[life] += later.askers[life]
            else:
                self.canaries[life], self.askers[life] = recorded, later.askers[life]
        for source, late in later.skew.items():
            self.skew[source] = min(self.skew.get(source, late), late)
        for worker, (count, seconds) in later.served.items():
            before, during = self.served.get(worker, (0, 0.0))
            self.served[worker] = (before + count, during + seconds)
        for worker, adverse in later.wrong.items():
            self.wrong[worker] += adverse
        for worker, times in later.exposed.items():
            self.exposed[worker] += times


def _result_of(fact: o.CanaryResult) -> int:
    if isinstance(fact, o.CanaryPassed):
        return GOOD
    if isinstance(fact, o.CanaryFailed) and fact.reason != "latency_spike":
        return WRONG if fact.reason in WRONG_REASONS else MUTE
    return SLOW
