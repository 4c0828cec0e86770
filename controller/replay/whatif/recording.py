"""What the world did, apart from what was decided: a part of history, in the form in which it is decided again and again.

Good canaries are nearly all of it, and say nothing new of a worker that is well: they are kept as numbers, and become facts again
where somebody asks (`canaries`). Of what was decided only the times stay, and how the weights went.
"""

from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any

from controller.deciders.fleet import Fleet, evolve
from controller.replay.whatif.weights import Weights
from events.decisions import (
    BreakerHalfOpened,
    BreakerOpened,
    GoldenAgreed,
    GoldenRetired,
    HealthChanged,
    HealthStatus,
    IncidentOpened,
    PolicyAdopted,
    SpareActivated,
    SpareReleased,
    WorkerDecision,
)
from events.errors import HoldfastError
from events.fact import Decision, Fact, Recorded
from events.observations import (
    CanaryFailed,
    CanaryPassed,
    CanaryResult,
    CanarySlow,
    CheckType,
    DeviceFaulted,
    DeviceRecovered,
    DrainFinished,
    DrainRequested,
    EngineFaulted,
    GoldenDisputed,
    GoldenProposed,
    RequestExposed,
    RequestFailed,
    RequestPoisonous,
    RequestsServed,
    ResumeRequested,
    ShutdownBegan,
    WorkerAwaited,
    WorkerHeard,
    WorkerJoined,
    WorkerLeft,
    WorkerSilent,
    WorkerSlow,
    WorkerSlowCleared,
)

EVENTS_MAX = 5_000_000  # of one question
SERVED_AFTER_S = 600.0  # after a failed request: so long good ones may matter
USUAL_INTERVAL_S, USUAL_SILENCE_S = 30.0, 3.0  # as the settings have them, where history does not tell
LATE_S = 1.5  # by which an observer may see it later
LEAST_GAPS = 8  # between canaries, from which their interval is known

GOOD, SLOW, WRONG, MUTE = range(4)  # what a canary said: right, right but slow, a wrong answer, none
WRONG_REASONS = ("token_mismatch", "logit_drift", "non_finite")
OF_THE_WORLD = (
    DeviceFaulted, DeviceRecovered, DrainFinished, DrainRequested, EngineFaulted, GoldenDisputed, GoldenProposed,
    RequestFailed, RequestPoisonous, ResumeRequested, ShutdownBegan, WorkerAwaited, WorkerHeard, WorkerJoined, WorkerLeft,
    WorkerSilent, WorkerSlow, WorkerSlowCleared,
)  # fmt: skip
GIVEN = (GoldenAgreed, GoldenRetired)  # what is right is no question of policy here


class TooMuch(HoldfastError):
    """A question of what if is of one part of history: narrow it with --since and --until, or ask for one --incident."""


@dataclass(frozen=True, slots=True)
class Happened:
    """One fact of the world, as it is fed to another course. Times are seconds since 1970 by the stream."""

    at: float
    fact: Fact
    id: str


@dataclass(slots=True)
class CanariesTold:
    """What canaries said of one life of a worker, oldest first."""

    worker: str
    instance: str
    at: "array[float]" = field(default_factory=lambda: array("d"))  # when the journal took it
    sent: "array[float]" = field(
        default_factory=lambda: array("d")
    )  # when it was asked, by the stream's clock
    said: bytearray = field(default_factory=bytearray)
    check: bytearray = field(default_factory=bytearray)  # a place in CHECKS
    asked: "array[int]" = field(default_factory=lambda: array("H"))  # a place in `names`
    names: list[str] = field(
        default_factory=list
    )  # of the canaries, in the order in which they were first asked
    facts: dict[int, CanaryFailed | CanarySlow] = field(default_factory=dict)  # all but the good ones
    good: CanaryPassed | None = None  # one of the good ones
    end: float = float("inf")  # of this life

    def __len__(self) -> int:
        return len(self.at)


CHECKS: tuple[CheckType, ...] = ("scheduled", "confirm", "trial", "join")


@dataclass(slots=True)
class Adverse:
    """Something that speaks against a worker."""

    at: float
    what: str


@dataclass(slots=True)
class Recording:
    """A part of history."""

    fleet: Fleet  # before the first event
    start: float
    end: float
    events: int
    happened: list[Happened]  # in the stream's order
    canaries: dict[tuple[str, str], CanariesTold]  # by worker and instance
    adverse: dict[str, list[Adverse]]  # by worker
    weights: Weights  # as they were
    decided: list[Decision]
    numbers: list[tuple[float, int]]  # when each decision was recorded, and its number
    incidents: dict[str, list[tuple[float, str]]]  # that opened, by worker
    exposed: dict[str, list[float]]  # when an answer was found to be exposed, by worker
    served: dict[str, tuple[int, float]]  # answers, and the seconds in which they were counted, by worker
    interval_s: float  # between canaries of a worker, as it was
    silence_s: float  # after which a worker was called silent, as it was
    dead: dict[tuple[str, str], float]  # when a life was held for dead
    late_s: float  # by which a decision came after it was due by time alone

    @property
    def policy(self) -> Mapping[str, Any]:
        """The policy with which it begins, as it was adopted."""
        if self.fleet.policy is not None:
            return self.fleet.policy
        adopted = (one.fact.policy for one in self.happened if isinstance(one.fact, PolicyAdopted))
        return next(adopted, {})


async def recorded(
    fleet: Fleet, batches: AsyncIterator[Sequence[Recorded]], decided: int = 0
) -> Recording | None:
    """Return what these events tell, from the fleet before the first of them on, with its decisions up to the sequence
    `decided`; None if there are none. Raise TooMuch."""
    reading = _Reading(fleet)
    async for batch in batches:
        for event in batch:
            if event.seq > decided or not isinstance(event.fact, Decision):
                reading.take(event)
    return reading.whole()


class _Reading:
    """What has been read so far."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = self._shown = fleet
        self._start: float | None = None
        self._end = 0.0
        self._events = 0
        self._happened: list[Happened] = []
        self._canaries: dict[tuple[str, str], CanariesTold] = {}
        self._adverse: dict[str, list[Adverse]] = defaultdict(list)
        self._decided: list[Decision] = []
        self._numbers: list[tuple[float, int]] = []
        self._incidents: dict[str, list[tuple[float, str]]] = defaultdict(list)
        self._exposed: dict[str, list[float]] = defaultdict(list)
        self._served: dict[str, tuple[int, float]] = {}
        self._failed_at: dict[str, float] = {}
        self._skew: dict[str, float] = {}  # of a prober's clock against the stream's, at least
        self._askers: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._silences: list[float] = []
        self._dead: dict[tuple[str, str], float] = {}
        self._late = _Lateness()
        self._weights = Weights(fleet)

    def take(self, event: Recorded) -> None:
        """Take one event in, in the stream's order."""
        self._events += 1
        if self._events > EVENTS_MAX:
            raise TooMuch(f"more than {EVENTS_MAX:,} events. {TooMuch.__doc__}")
        self._end = at = event.at.timestamp()
        if self._start is None:
            self._start = at
        fact = event.fact
        if isinstance(fact, CanaryResult):
            self._canary(at, event.source, fact)
        elif isinstance(fact, RequestsServed):
            self._serves(at, event, fact)
        elif isinstance(fact, Decision):
            self._decision(at, event, fact)
        elif isinstance(fact, OF_THE_WORLD):
            self._world(at, event, fact)
        elif isinstance(fact, RequestExposed):
            self._exposed[fact.worker].append(at)

    def _canary(self, at: float, source: str, fact: CanaryResult) -> None:
        life = (fact.worker, fact.instance)
        told = self._canaries.get(life)
        if told is None:
            told = self._canaries[life] = CanariesTold(*life)
        place = len(told.at)
        told.at.append(at)
        told.sent.append(sent := fact.sent_at.timestamp())
        told.check.append(CHECKS.index(fact.check_type))
        if fact.canary not in told.names:
            told.names.append(fact.canary)
        told.asked.append(told.names.index(fact.canary))
        told.said.append(said := _said(fact))
        if isinstance(fact, CanaryPassed):
            told.good = told.good or fact
        elif isinstance(fact, CanaryFailed | CanarySlow):
            told.facts[place] = fact
        if isinstance(fact, CanaryFailed) and said in (WRONG, MUTE):
            self._adverse[fact.worker].append(Adverse(at, fact.reason))
        self._askers[life].append(source)
        late = at - sent - (fact.latency_ms / 1000 if said < WRONG else 0.0)
        self._skew[source] = min(self._skew.get(source, late), late)

    def _serves(self, at: float, event: Recorded, fact: RequestsServed) -> None:
        count, seconds = self._served.get(fact.worker, (0, 0.0))
        self._served[fact.worker] = (count + fact.count, seconds + fact.window_s)
        if at - self._failed_at.get(fact.worker, float("-inf")) < SERVED_AFTER_S:
            self._happened.append(Happened(at, fact, event.id))

    def _decision(self, at: float, event: Recorded, fact: Decision) -> None:
        self._fold(at, event, fact)
        self._numbers.append((at, fact.number))
        if isinstance(fact, GIVEN):
            self._happened.append(Happened(at, fact, event.id))
        if isinstance(fact, IncidentOpened):
            kind, _, who = fact.subject.partition(":")
            if kind == "worker":
                self._incidents[who].append((at, fact.incident))
        if isinstance(fact, HealthChanged) and fact.after is HealthStatus.DEAD:
            self._dead[fact.worker, fact.instance] = at
        self._late.decided(at, fact)
        if isinstance(fact, PolicyAdopted):
            self._happened.append(Happened(at, fact, event.id))
        else:
            self._decided.append(fact)

    def _world(self, at: float, event: Recorded, fact: Fact) -> None:
        self._happened.append(Happened(at, fact, event.id))
        before = self._shown.workers.get(getattr(fact, "worker", ""))
        self._fold(at, event, fact)
        match fact:
            case RequestFailed():
                self._failed_at[fact.worker] = at
                self._adverse[fact.worker].append(Adverse(at, f"requests: {fact.reason}"))
            case WorkerSilent():
                self._silences.append(fact.silent_s)
                self._adverse[fact.worker].append(Adverse(at, "silent"))
            case DeviceFaulted(fatal=True) | EngineFaulted(fatal=True):
                what = fact.fault_class if isinstance(fact, DeviceFaulted) else f"engine: {fact.reason}"
                self._adverse[fact.worker].append(Adverse(at, what))
            case WorkerLeft():
                if fact.mode != "graceful":
                    self._adverse[fact.worker].append(Adverse(at, f"left: {fact.mode}"))
                self._over(fact.worker, fact.instance, at)
            case WorkerJoined():
                if before is not None and before.joined.instance != fact.instance:
                    self._over(fact.worker, before.joined.instance, at)
            case _:
                pass

    def _fold(self, at: float, event: Recorded, fact: Fact) -> None:
        """Follow the weights. They move with decisions; of canaries and requests nothing has to be known for that."""
        self._shown = evolve(self._shown, event)
        if isinstance(fact, SpareActivated | SpareReleased):
            for name, worker in self._shown.workers.items():
                self._weights.note(at, name, worker)
        elif isinstance(fact, WorkerDecision | WorkerJoined):
            self._weights.note(at, fact.worker, self._shown.workers.get(fact.worker))

    def _over(self, worker: str, instance: str, at: float) -> None:
        """End a life, unless it has ended because it was held for dead: on another course it may go on."""
        told = self._canaries.get((worker, instance))
        if told is not None and (worker, instance) not in self._dead:
            told.end = min(told.end, at)

    def whole(self) -> Recording | None:
        """Return all that was read."""
        if self._start is None:
            return None
        for life, told in self._canaries.items():
            for place, source in enumerate(self._askers[life]):
                told.sent[place] = min(told.at[place], told.sent[place] + self._skew[source])
        return Recording(
            self._fleet,
            self._start,
            self._end,
            self._events,
            self._happened,
            self._canaries,
            dict(self._adverse),
            self._weights,
            self._decided,
            self._numbers,
            dict(self._incidents),
            dict(self._exposed),
            self._served,
            _interval(self._canaries.values()),
            _silence(self._silences),
            self._dead,
            self._late.usual(),
        )


class _Lateness:
    """By how much decisions come after they are due by time alone: of breakers it is known when that is."""

    def __init__(self) -> None:
        self._retry_at: dict[str, float] = {}
        self._late: list[float] = []

    def decided(self, at: float, fact: Decision) -> None:
        """Take a decision."""
        if isinstance(fact, BreakerOpened):
            self._retry_at[fact.worker] = fact.retry_at.timestamp()
        elif isinstance(fact, BreakerHalfOpened) and fact.worker in self._retry_at:
            self._late.append(max(0.0, at - self._retry_at.pop(fact.worker)))

    def usual(self) -> float:
        """Return it, in seconds."""
        return median(self._late) if self._late else 0.0


def _said(fact: CanaryResult) -> int:
    if isinstance(fact, CanaryPassed):
        return GOOD
    if isinstance(fact, CanaryFailed) and fact.reason != "latency_spike":
        return WRONG if fact.reason in WRONG_REASONS else MUTE
    return SLOW


def _interval(lives: Iterable[CanariesTold]) -> float:
    """Return the usual time from one scheduled canary of a worker to the next."""
    gaps = [
        told.sent[n] - told.sent[n - 1]
        for told in lives
        for n in range(1, min(len(told), 200))
        if told.check[n] == 0 == told.check[n - 1] and told.said[n] == GOOD
    ]
    return median(gaps) if len(gaps) >= LEAST_GAPS else USUAL_INTERVAL_S


def _silence(seconds: Sequence[float]) -> float:
    """Return after how long a worker was called silent: the usual time, if these were called so soon after that."""
    least = min(seconds, default=USUAL_SILENCE_S)
    return USUAL_SILENCE_S if USUAL_SILENCE_S <= least < USUAL_SILENCE_S + LATE_S else least


def instant(at: float) -> datetime:
    """Return a time as facts have it."""
    return datetime.fromtimestamp(at, UTC)
