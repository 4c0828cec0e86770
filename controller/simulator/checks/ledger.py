"""The check ledger: a second, simple fold of the journal, with which invariants compare the fleet.

The ledger shares no code with the deciders. It records the contents of each decision, so that a comparison shows if a fold
has diverged from the decisions.
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from controller.frontend.request import effects as do
from controller.frontend.request import events as on
from controller.frontend.request.effects import Effects
from controller.frontend.request.failures import FULL, Failure
from controller.frontend.request.state import RequestState
from controller.router.endpoints import Key
from controller.simulator.world.traffic import SimulatedRequest
from events import decisions as decided
from events import observations as seen
from events.fact import Decision, Recorded


@dataclass(slots=True)
class LedgerEntry:
    """The last decisions about one worker instance, and the evidence against it."""

    worker: str
    instance: str
    model: str
    status: decided.HealthStatus | None = None  # None: no health was decided yet
    weight: float = 0.0
    reason: str = ""
    position: str = "closed"
    moved_by: int = 0
    due: datetime | None = None  # when an open breaker's trial starts, or when a running trial must end
    draining_until: datetime | None = None
    cap: float | None = None
    forgotten: bool = False
    # Canary results: sequence, breaker move under which it was sent, failed.
    results: list[tuple[int, int, bool]] = field(default_factory=list)
    # Request failures: sequence, breaker move under which it was routed, failures in a row.
    failures: list[tuple[int, int, int]] = field(default_factory=list)
    # Device limits: sequence, device, the weight it allows. An empty device lifts all limits.
    limits: list[tuple[int, str, float]] = field(default_factory=list)
    limited_at: datetime | None = None  # when the last limit was recorded
    has_served: bool = False
    failed_canary: bool = False  # a canary failed by more than lateness since the last good answer
    hard: bool = False  # evidence other than lateness since the worker last entered service

    @property
    def out_by_lateness(self) -> bool:
        """Whether evidence of lateness alone has taken the instance out of service.

        Lateness means slow answers, or timeouts while the engine still makes progress.
        """
        if (
            self.status in (None, decided.HealthStatus.DRAINING, decided.HealthStatus.DEAD)
            or self.draining_until is not None
        ):
            return False
        return self.has_served and not (self.share or self.hard or self.failed_canary)

    def limit(self, through: int) -> float:
        """Return the weight that the worker's devices allow, by the facts up to sequence `through`."""
        standing: dict[str, float] = {}
        for seq, device, weight in self.limits:
            if seq > through:
                break
            if device:
                standing[device] = weight
            else:
                standing.clear()
        return min(standing.values(), default=1.0)

    @property
    def share(self) -> float:
        """The share of the worker's capacity that the decisions allow, 0 to 1."""
        if self.position != "closed" and self.cap is None:
            return 0.0
        return max(self.weight, self.cap or 0.0)

    def observe(self, seq: int, fact: seen.WorkerObservation) -> None:
        """Record a canary's result or a failed request."""
        if isinstance(fact, seen.CanaryResult):
            failed = isinstance(fact, seen.CanaryFailed) and fact.reason != "latency_spike"
            self.results.append((seq, fact.sent_under, failed))
        elif isinstance(fact, seen.RequestFailed):
            self.failures.append((seq, fact.routed_under, fact.failures_in_a_row))

    def weigh(self, fact: seen.WorkerObservation) -> None:
        """Record whether a fact is evidence against the worker other than lateness."""
        match fact:
            case seen.CanaryPassed() | seen.CanarySlow() | seen.CanaryFailed(reason="latency_spike"):
                self.failed_canary = False
            case seen.CanaryFailed(reason="timeout", engine_went_on=True):
                pass
            case seen.CanaryFailed(confirmed=True) | seen.CanaryFailed(reason="non_finite"):
                self.hard = True
            case seen.CanaryFailed():
                self.failed_canary = True
            case (
                seen.WorkerSlow()
                | seen.WorkerSlowCleared()
                | seen.RequestsServed()
                | seen.WorkerHeard()
                | seen.GoldenProposed()
            ):
                pass
            case _:
                self.hard = True

    def note_limit(self, event: Recorded, fact: seen.WorkerObservation) -> None:
        """Record that a device limits the worker's weight, or that a resume lifted all limits."""
        match fact:
            case seen.DeviceFaulted(weight=float() as weight, fatal=False):
                self.limits.append((event.seq, f"{fact.device} {fact.fault_class}", weight))
            case seen.DeviceRecovered():
                self.limits.append((event.seq, f"{fact.device} {fact.fault_class}", 1.0))
            case seen.ResumeRequested():
                self.limits.append((event.seq, "", 1.0))
            case _:
                return
        self.limited_at = event.at

    def decide(self, fact: decided.WorkerDecision) -> None:
        """Record the effect of a decision."""
        served = self.share > 0
        match fact:
            case decided.HealthChanged():
                self.status, self.weight, self.reason = fact.after, fact.weight, fact.reason
            case decided.BreakerOpened():
                self.position, self.due, self.moved_by = "open", fact.retry_at, fact.number
            case decided.BreakerHalfOpened():
                self.position, self.due, self.moved_by = "half_open", fact.deadline, fact.number
            case decided.BreakerClosed():
                self.position, self.due, self.moved_by = "closed", None, fact.number
            case decided.DrainStarted():
                self.draining_until = fact.deadline
            case decided.DrainEnded():
                self.draining_until = None
            case decided.WeightCapped():
                self.cap = fact.weight
            case decided.WorkerForgotten():
                self.forgotten = True
        if self.share > 0 and not served:
            self.has_served, self.hard, self.failed_canary = True, False, False


@dataclass(slots=True)
class CheckLedger:
    """The ledger's entry for each worker, and its records of models, incidents and proposals."""

    number: int = 0
    entries: dict[str, LedgerEntry] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)  # instances
    levels: Counter[str] = field(default_factory=Counter)  # by model, as last decided
    level_since: dict[str, datetime] = field(default_factory=dict)
    incidents: dict[str, datetime] = field(default_factory=dict)
    observed: dict[str, tuple[int, seen.WorkerObservation]] = field(
        default_factory=dict
    )  # id: sequence, fact
    numbers: dict[str, int] = field(default_factory=dict)  # number of each source's last fact
    # By model: end of the last minute for which traffic was reported.
    reported_until: dict[str, datetime] = field(default_factory=dict)
    # By model: sequence and number.
    scales_set: dict[str, list[tuple[int, int | None]]] = field(default_factory=dict)
    proposals: dict[str, list[Recorded]] = field(default_factory=dict)  # by model

    def write(self, event: Recorded) -> None:
        """Record one event of the journal."""
        fact, news = event.fact, self._is_news(event)
        match fact:
            case Decision():
                self.number = fact.number
                self._decide(fact)
            case seen.WorkerObservation():
                self.observed.setdefault(event.id, (event.seq, fact))
                self._observe(event, fact, news)
            case seen.TrafficReported():
                end = fact.minute + timedelta(minutes=1)
                self.reported_until[fact.model] = max(end, self.reported_until.get(fact.model, end))
            case seen.ScaleSet():
                self.scales_set.setdefault(fact.model, []).append((event.seq, fact.workers))
            case seen.ScaleProposed():
                self.proposals.setdefault(fact.model, []).append(event)

    def of(self, worker: str, instance: str) -> LedgerEntry | None:
        """Return the worker's entry if it is about this instance; None otherwise."""
        entry = self.entries.get(worker)
        return entry if entry is not None and entry.instance == instance else None

    def observation(self, id: str) -> tuple[int, seen.WorkerObservation | None]:
        """Return the sequence and the fact of the first observation with this id, or (0, None)."""
        return self.observed.get(id, (0, None))

    def _is_news(self, event: Recorded) -> bool:
        """Return whether an event is not a repetition.

        The fact of a repetition has a number that is not above the last number of its source.
        """
        last = self.numbers.get(event.source, 0)
        self.numbers[event.source] = max(last, event.source_number)
        return not event.source_number or event.source_number > last

    def _observe(self, event: Recorded, fact: seen.WorkerObservation, news: bool) -> None:
        entry = self.entries.get(fact.worker)
        if isinstance(fact, seen.WorkerJoined):
            if entry is None or _life(entry.instance) < _life(fact.instance):
                self.entries[fact.worker] = LedgerEntry(fact.worker, fact.instance, fact.model)
        elif entry is not None and entry.instance == fact.instance:
            entry.weigh(fact)
            entry.observe(event.seq, fact)
            if news:
                entry.note_limit(event, fact)

    def _decide(self, fact: Decision) -> None:
        match fact:
            case decided.DegradationChanged():
                self.levels[fact.model] = fact.after
                self.level_since[fact.model] = fact.decided_at
            case decided.IncidentOpened():
                self.incidents[fact.incident or fact.subject] = fact.decided_at
            case decided.IncidentClosed():
                self.incidents.pop(fact.incident or fact.subject, None)
            case decided.WorkerDecision() if entry := self.of(fact.worker, fact.instance):
                entry.decide(fact)
                if entry.status is decided.HealthStatus.DEAD:
                    self.dead.add(entry.instance)


def _life(instance: str) -> int:
    return int(instance.rpartition(".")[2])


@dataclass(slots=True)
class RequestLedger:
    """The history of one request, recorded from the events and effects of its state machine."""

    before: RequestState
    ends: int = 0
    paid: int = 0  # attempts that cost budget
    free: bool = False  # the next attempt costs no budget, because nothing had failed
    at: Key | None = None  # the worker of the current attempt
    charged: bool = False  # the current attempt has cost budget
    tried: set[Key] = field(default_factory=set)
    failed: set[Key] = field(default_factory=set)  # those that failed by more than a broken connection
    first: Failure | None = None  # failures since the last token
    moving: bool = False  # an attempt was lost, and no token has arrived since the loss
    outage: bool = False
    waits_since: float | None = None  # since when the request has had no worker, in seconds
    could_resume_since: int | None = None

    def write(self, step: "MachineStep", now: float) -> None:
        """Record one event of the request and its effects. `now` is in seconds of virtual time."""
        _, request, event, effects = step
        self.ends += sum(isinstance(one, do.Complete | do.Refuse | do.End) for one in effects)
        for effect in effects:
            if isinstance(effect, do.CountFailure | do.CountRestored):
                self.outage = isinstance(effect, do.CountFailure)
        match event:
            case on.Sent(server) | on.Switched(server):
                self.charged = not self.free and isinstance(event, on.Sent)
                self.paid += self.charged
                self.at, self.free, self.waits_since = server.key, False, None
                self.moving = self.moving or isinstance(event, on.Switched)
            case on.FirstToken():
                self.first, self.moving = None, False
            case on.MovedOnPurpose():
                self.free, self.moving, self.at, self.waits_since = True, True, None, now
            case on.NoneLeft() | on.Resumed() if self.before.phase == "preempted":
                self.waits_since = now  # the request was preempted until now
            case on.ConnectFailed(key):
                self.tried.add(key)
            case on.AttemptFailed(failure):
                self._attempt_failed(failure, now)
            case on.WorkerUnhealthy() if request.state.phase != self.before.phase:
                self._lost(Failure("unhealthy", ""), now)
            case on.Exposed(key=key) if do.CancelStream("elsewhere") in effects:
                self._exposed(key, now)
        self.before = request.state

    def _exposed(self, key: Key, now: float) -> None:
        if key == self.at:
            self._lost(Failure("unhealthy", "corrupt output"), now)
        else:  # the worker is healthy and only restarts the request
            self.paid -= self.charged and self.at is not None
            self._moved(Failure("unhealthy", "corrupt KV cache"), now)

    def _attempt_failed(self, failure: Failure, now: float) -> None:
        if failure.reason == FULL and not self.before.has_output:  # the worker only had no room
            self.paid -= self.charged
            self.free, self.at = not self.charged, None
        else:
            self._lost(failure, now)

    def _lost(self, failure: Failure, now: float) -> None:
        assert self.at is not None
        kind = failure.kind
        if kind.free and not self.before.has_output and self.at not in self.tried:
            self.paid -= self.charged
        self.tried.add(self.at)
        if not kind.again:
            self.failed.add(self.at)
        self._moved(failure, now)

    def _moved(self, failure: Failure, now: float) -> None:
        self.first, self.at, self.moving, self.waits_since = self.first or failure, None, True, now
        self.free = False


class MachineStep(NamedTuple):
    """One step of a request's state machine.

    `ledger` shows the history before the step, and `request` has the state after it.
    """

    ledger: RequestLedger
    request: SimulatedRequest
    event: on.Event
    effects: Effects
