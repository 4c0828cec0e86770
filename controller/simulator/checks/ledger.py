"""What the decisions say, and nothing else: a second, naive reading of the journal.

It shares no code with the deciders. It writes down, decision by decision, what each one carried, and so can
contradict a fold that drifted away from them.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from events.decisions import (
    BreakerClosed,
    BreakerHalfOpened,
    BreakerOpened,
    DegradationChanged,
    DrainEnded,
    DrainStarted,
    GoldenAgreed,
    HealthChanged,
    HealthStatus,
    IncidentClosed,
    IncidentOpened,
    Knobs,
    WeightCapped,
    WorkerForgotten,
)
from events.fact import Decision, Recorded
from events.observations import (
    CanaryFailed,
    CanaryPassed,
    CanaryResult,
    CanarySlow,
    DeviceFaulted,
    DeviceRecovered,
    GoldenProposed,
    RequestFailed,
    RequestsServed,
    ResumeRequested,
    ScaleProposed,
    ScaleSet,
    TrafficReported,
    WorkerHeard,
    WorkerJoined,
    WorkerObservation,
    WorkerSlow,
    WorkerSlowCleared,
)


@dataclass(slots=True)
class LedgerEntry:
    """What was last decided about one instance of a worker."""

    worker: str
    instance: str
    model: str
    status: HealthStatus | None = None  # None: nothing decided yet
    weight: float = 0.0
    reason: str = ""
    position: str = "closed"
    moved_by: int = 0
    deadline: datetime | None = None  # of the trial
    retry_at: datetime | None = None
    draining_until: datetime | None = None
    cap: float | None = None
    forgotten: bool = False
    results: list[tuple[int, int, bool]] = field(
        default_factory=list
    )  # of canaries: sequence, sent under, failed
    failures: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # of requests: sequence, routed under, in a row

    limits: list[tuple[int, str, float | None]] = field(
        default_factory=list
    )  # of devices: sequence, which, the weight left (None: all of it); of nobody in particular: all are lifted
    limited_at: datetime | None = None  # when the journal took the last of them
    has_served: bool = False
    failed_canary: bool = False  # with more than lateness, since its last good answer
    hard: bool = False  # anything else than lateness spoke against it since it came into service last

    @property
    def out_by_lateness(self) -> bool:
        """Whether it was taken out of service, and nothing but lateness spoke against it."""
        leaves = (
            self.status in (None, HealthStatus.DRAINING, HealthStatus.DEAD) or self.draining_until is not None
        )
        return self.has_served and not self.share and not (leaves or self.hard or self.failed_canary)

    def limit(self, through: int) -> float:
        """Return the weight that its devices leave it, as far as somebody knows who has read up to `through`."""
        standing: dict[str, float] = {}
        for seq, device, weight in self.limits:
            if seq > through:
                break
            if not device:
                standing.clear()
            elif weight is None:
                standing.pop(device, None)
            else:
                standing[device] = weight
        return min(standing.values(), default=1.0)

    @property
    def share(self) -> float:
        """The part of its capacity that the decisions leave it."""
        if self.position != "closed" and self.cap is None:
            return 0.0
        return max(self.weight, self.cap or 0.0)


@dataclass(slots=True)
class CheckLedger:
    """All entries, by worker, and what concerns models and incidents."""

    number: int = 0
    entries: dict[str, LedgerEntry] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)  # instances
    knobs: dict[str, Knobs] = field(default_factory=dict)
    levels: dict[str, int] = field(default_factory=dict)
    level_since: dict[str, datetime] = field(default_factory=dict)
    incidents: dict[str, datetime] = field(default_factory=dict)
    agreed: set[tuple[str, str]] = field(default_factory=set)
    observed: dict[str, tuple[int, WorkerObservation]] = field(default_factory=dict)  # id: sequence, fact
    numbers: dict[str, int] = field(default_factory=dict)  # of each source's last fact
    told: dict[str, datetime] = field(
        default_factory=dict
    )  # by model: the end of the last minute that is told of
    scales_set: dict[str, list[tuple[int, int | None]]] = field(
        default_factory=dict
    )  # by model: sequence, number
    proposals: dict[str, list[Recorded]] = field(default_factory=dict)  # by model

    def write(self, event: Recorded) -> None:
        """Write one event down."""
        fact, news = event.fact, self._is_news(event)
        if news and isinstance(fact, DeviceFaulted | DeviceRecovered | ResumeRequested):
            self._limit(event, fact)
        if isinstance(fact, WorkerObservation):
            self.observed.setdefault(event.id, (event.seq, fact))
            if isinstance(fact, WorkerJoined):
                self._join(fact)
            else:
                self._outcome(event.seq, fact)
        elif isinstance(fact, Decision):
            self.number = fact.number
            self._decide(fact)
        elif isinstance(fact, TrafficReported | ScaleSet | ScaleProposed):
            self._plan(event, fact)

    def _plan(self, event: Recorded, fact: TrafficReported | ScaleSet | ScaleProposed) -> None:
        match fact:
            case TrafficReported():
                end = fact.minute + timedelta(minutes=1)
                self.told[fact.model] = max(end, self.told.get(fact.model, end))
            case ScaleSet():
                self.scales_set.setdefault(fact.model, []).append((event.seq, fact.workers))
            case ScaleProposed():
                self.proposals.setdefault(fact.model, []).append(event)

    def of(self, worker: str, instance: str) -> LedgerEntry | None:
        """Return an instance's entry, if it is the current one."""
        entry = self.entries.get(worker)
        return entry if entry is not None and entry.instance == instance else None

    def observation(self, id: str) -> tuple[int, WorkerObservation] | None:
        """Return the first observation of that id and its sequence."""
        return self.observed.get(id)

    def taken_at(self, model: str) -> datetime | None:
        """Return when a model's level was decided last."""
        return self.level_since.get(model)

    def degraded(self) -> dict[str, int]:
        """Return the models that are not at level 0, and their levels."""
        return {model: level for model, level in self.levels.items() if level}

    def _join(self, fact: WorkerJoined) -> None:
        entry = self.entries.get(fact.worker)
        if entry is None or _life(entry.instance) < _life(fact.instance):
            self.entries[fact.worker] = LedgerEntry(fact.worker, fact.instance, fact.model)

    def _is_news(self, event: Recorded) -> bool:
        """Return whether it is no repetition: what does not count up was said before."""
        last = self.numbers.get(event.source, 0)
        self.numbers[event.source] = max(last, event.source_number)
        return not event.source_number or event.source_number > last

    def _limit(self, event: Recorded, fact: DeviceFaulted | DeviceRecovered | ResumeRequested) -> None:
        entry = self.of(fact.worker, fact.instance)
        if entry is None:
            return
        match fact:
            case DeviceFaulted(weight=float(), fatal=False):
                entry.limits.append((event.seq, f"{fact.device} {fact.fault_class}", fact.weight))
            case DeviceRecovered():
                entry.limits.append((event.seq, f"{fact.device} {fact.fault_class}", None))
            case ResumeRequested():
                entry.limits.append((event.seq, "", None))
            case _:
                return
        entry.limited_at = event.at

    def _outcome(self, seq: int, fact: WorkerObservation) -> None:
        entry = self.of(fact.worker, fact.instance)
        if entry is not None:
            _weigh(entry, fact)
        if entry is not None and isinstance(fact, CanaryResult):
            failed = isinstance(fact, CanaryFailed) and fact.reason != "latency_spike"
            entry.results.append((seq, fact.sent_under, failed))
        elif entry is not None and isinstance(fact, RequestFailed):
            entry.failures.append((seq, fact.routed_under, fact.failures_in_a_row))

    def _decide(self, fact: Decision) -> None:
        match fact:
            case DegradationChanged():
                self.levels[fact.model] = fact.after
                self.knobs[fact.model] = fact.knobs
                self.level_since[fact.model] = fact.decided_at
            case IncidentOpened():
                self.incidents[fact.incident or fact.subject] = fact.decided_at
            case IncidentClosed():
                self.incidents.pop(fact.incident or fact.subject, None)
            case GoldenAgreed():
                self.agreed.add((fact.canary_key, fact.canary))
            case _:
                entry = self.of(getattr(fact, "worker", ""), getattr(fact, "instance", ""))
                if entry is not None:
                    _write(entry, fact)
                    if entry.status is HealthStatus.DEAD:
                        self.dead.add(entry.instance)


def _weigh(entry: LedgerEntry, fact: WorkerObservation) -> None:
    """Note whether more than lateness speaks against a worker."""
    match fact:
        case CanaryPassed() | CanarySlow() | CanaryFailed(reason="latency_spike"):
            entry.failed_canary = False
        case CanaryFailed(reason="timeout", engine_went_on=True):
            pass
        case CanaryFailed(confirmed=True) | CanaryFailed(reason="non_finite"):
            entry.hard = True
        case CanaryFailed():
            entry.failed_canary = True
        case WorkerSlow() | WorkerSlowCleared() | RequestsServed() | WorkerHeard() | GoldenProposed():
            pass
        case _:
            entry.hard = True


def _write(entry: LedgerEntry, fact: Decision) -> None:
    served = entry.share > 0
    _decide(entry, fact)
    if entry.share > 0 and not served:
        entry.has_served, entry.hard, entry.failed_canary = True, False, False


def _decide(entry: LedgerEntry, fact: Decision) -> None:
    match fact:
        case HealthChanged():
            entry.status, entry.weight, entry.reason = fact.after, fact.weight, fact.reason
        case BreakerOpened():
            entry.position, entry.retry_at, entry.deadline = "open", fact.retry_at, None
        case BreakerHalfOpened():
            entry.position, entry.deadline = "half_open", fact.deadline
        case BreakerClosed():
            entry.position, entry.deadline = "closed", None
        case DrainStarted():
            entry.draining_until = fact.deadline
        case DrainEnded():
            entry.draining_until = None
        case WeightCapped():
            entry.cap = fact.weight
        case WorkerForgotten():
            entry.forgotten = True
    if isinstance(fact, BreakerOpened | BreakerHalfOpened | BreakerClosed):
        entry.moved_by = fact.number


def _life(instance: str) -> int:
    return int(instance.rpartition(".")[2])
