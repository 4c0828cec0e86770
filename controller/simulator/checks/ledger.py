"""The check ledger: a second, simple record of the journal, with which invariants compare the fleet.

The ledger shares no code with the deciders, and records the contents of each decision. A comparison with the ledger therefore
shows whether a fleet state has diverged from the decisions.
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
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

# Facts that show at most that a worker is late.
HARMLESS = (
    seen.WorkerSlow,
    seen.WorkerSlowCleared,
    seen.RequestsServed,
    seen.WorkerHeard,
    seen.GoldenProposed,
)


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
    serving_since: datetime | None = None  # since when the decisions have allowed it a share
    has_served: bool = False
    failed_canary: bool = False  # a canary failed by more than lateness since the last good answer
    hard: bool = False  # evidence other than lateness since the worker last entered service

    @property
    def out_by_lateness(self) -> bool:
        """Whether evidence of lateness alone has taken the instance out of service.

        Lateness means slow answers, or timeouts while the engine still makes progress.
        """
        resting = (None, decided.HealthStatus.DRAINING, decided.HealthStatus.DEAD)
        if self.status in resting or self.draining_until is not None:
            return False
        return self.has_served and not (self.share or self.hard or self.failed_canary)

    def limit(self, through: int) -> float:
        """Return the lowest weight (0 to 1) to which any device limits the worker; 1.0 if no limit is in force.

        Only facts up to the sequence `through` count.
        """
        standing: dict[str, float] = {}
        for _, device, weight in takewhile(lambda limit: limit[0] <= through, self.limits):
            standing = {**standing, device: weight} if device else {}
        return min(standing.values(), default=1.0)

    @property
    def share(self) -> float:
        """The share of the worker's capacity that the decisions allow, 0 to 1."""
        if self.position != "closed" and self.cap is None:
            return 0.0
        return max(self.weight, self.cap or 0.0)

    def observe(self, seq: int, fact: seen.WorkerObservation) -> None:
        """Record a canary's result or a failed request, and whether the fact is evidence of more than lateness.

        Lateness means slow answers, or timeouts while the engine still makes progress.
        """
        if isinstance(fact, seen.CanaryResult):
            failed = isinstance(fact, seen.CanaryFailed) and fact.reason != "latency_spike"
            self.results.append((seq, fact.sent_under, failed))
        elif isinstance(fact, seen.RequestFailed):
            self.failures.append((seq, fact.routed_under, fact.failures_in_a_row))
        match fact:
            case seen.CanaryPassed() | seen.CanarySlow() | seen.CanaryFailed(reason="latency_spike"):
                self.failed_canary = False
            case seen.CanaryFailed(reason="timeout", engine_went_on=True):
                pass
            case seen.CanaryFailed(confirmed=True) | seen.CanaryFailed(reason="non_finite"):
                self.hard = True
            case seen.CanaryFailed():
                self.failed_canary = True
            case _ if not isinstance(fact, HARMLESS):
                self.hard = True

    def note_limit(self, event: Recorded, fact: seen.WorkerObservation) -> None:
        """Record a fact that sets or lifts a device's limit on the worker's weight; ignore other facts."""
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

    def decide(self, at: datetime, fact: decided.WorkerDecision) -> None:
        """Record what a decision changes.

        A decision can change the worker's status, weight, breaker, drain or weight cap, or forget the worker.
        """
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
        if not self.share:
            self.serving_since = None
        elif self.serving_since is None:
            self.serving_since, self.has_served = at, True
            self.hard = self.failed_canary = False


@dataclass(slots=True)
class CheckLedger:
    """An independent record of the journal.

    It holds one entry per worker, all health decisions, degradation levels, open incidents, and observations of workers.
    """

    number: int = 0
    entries: dict[str, LedgerEntry] = field(default_factory=dict)
    # By instance: sequence and health of each decision.
    verdicts: dict[str, list[tuple[int, decided.HealthStatus]]] = field(default_factory=dict)
    levels: Counter[str] = field(default_factory=Counter)  # by model, as last decided
    worst_levels: Counter[str] = field(default_factory=Counter)  # by model
    level_since: dict[str, datetime] = field(default_factory=dict)
    incidents: dict[str, datetime] = field(default_factory=dict)
    # By id: sequence and fact.
    observed: dict[str, tuple[int, seen.WorkerObservation]] = field(default_factory=dict)

    def write(self, event: Recorded) -> None:
        """Record one event of the journal."""
        fact = event.fact
        if isinstance(fact, Decision):
            self.number = fact.number
            self._decide(event, fact)
        elif isinstance(fact, seen.WorkerObservation):
            self._observe(event, fact, news=event.id not in self.observed)
            self.observed.setdefault(event.id, (event.seq, fact))

    def of(self, worker: str, instance: str) -> LedgerEntry | None:
        """Return the worker's entry if it is about this instance; None otherwise."""
        entry = self.entries.get(worker)
        return entry if entry is not None and entry.instance == instance else None

    def observation(self, id: str) -> tuple[int, seen.WorkerObservation | None]:
        """Return the sequence and the fact of the first observation with this id; (0, None) if there is none."""
        return self.observed.get(id, (0, None))

    def status_at(self, instance: str, seq: int) -> decided.HealthStatus | None:
        """Return the last decided health of an instance in the events up to `seq`; None if none was decided."""
        verdicts = self.verdicts.get(instance, [])
        at = bisect_right(verdicts, seq, key=lambda verdict: verdict[0])
        return verdicts[at - 1][1] if at else None

    def _observe(self, event: Recorded, fact: seen.WorkerObservation, *, news: bool) -> None:
        entry = self.entries.get(fact.worker)
        if isinstance(fact, seen.WorkerJoined):
            if entry is None or _life(entry.instance) < _life(fact.instance):
                self.entries[fact.worker] = LedgerEntry(fact.worker, fact.instance, fact.model)
        elif entry is not None and entry.instance == fact.instance:
            entry.observe(event.seq, fact)
            if news:
                entry.note_limit(event, fact)

    def _decide(self, event: Recorded, fact: Decision) -> None:
        if isinstance(fact, decided.HealthChanged):
            self.verdicts.setdefault(fact.instance, []).append((event.seq, fact.after))
        match fact:
            case decided.DegradationChanged():
                self.levels[fact.model] = fact.after
                self.worst_levels[fact.model] = max(fact.after, self.worst_levels[fact.model])
                self.level_since[fact.model] = fact.decided_at
            case decided.IncidentOpened():
                self.incidents[fact.incident or fact.subject] = fact.decided_at
            case decided.IncidentClosed():
                self.incidents.pop(fact.incident or fact.subject, None)
            case decided.WorkerDecision() if entry := self.of(fact.worker, fact.instance):
                entry.decide(event.at, fact)


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

    def write(self, step: "MachineStep", now: float) -> None:
        """Record one event of the request's state machine, with the effects that the event caused.

        `now` is in seconds of virtual time.
        """
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
