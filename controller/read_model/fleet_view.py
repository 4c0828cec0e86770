"""Defines the data that all displays of a fleet show: `status`, `top`, the console and post-mortems.

A `WorkerView` is created from a worker in the fleet state (`WorkerView.of`), or from a controller's answer to `status`
(`FleetStatus.of`). The displays only format the data.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Self

import msgspec

from controller.deciders.worker import SPARE, Worker
from events.decisions import HealthStatus

HEALTHY = HealthStatus.HEALTHY.value
URGENCY = ("UNHEALTHY", "SUSPICIOUS", "DRAINING", "DEAD", HEALTHY)  # health statuses, the worst first
# displayed states of a healthy worker that is not at full weight
SPARE_STATE, RAMPING, CAPPED = "SPARE", "RAMPING", "CAPPED"
WELL = (HEALTHY, SPARE_STATE)  # displayed states of a worker that needs no attention


@dataclass(frozen=True, slots=True)
class CanaryView:
    """The last canary of a worker, as displays show it."""

    outcome: str = ""  # passed, slow or failed
    reason: str | None = None  # why the canary failed; None: it did not fail
    latency_ms: float | None = None
    at: datetime | None = None

    @property
    def result(self) -> str:
        """The reason if the canary failed, else `passed` or `slow`."""
        return self.reason or self.outcome


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker, as displays show it. Two views are equal if the fields that a post-mortem shows are equal."""

    id: str
    health: str
    model: str = ""
    weight: float | None = None  # share of the traffic, 0 to 1
    breaker: str = ""
    reasons: tuple[str, ...] = ()
    spare: bool = False  # the worker waits as a spare and serves no requests
    # the health, or for a healthy worker that is not at full weight: SPARE, CAPPED or RAMPING (its weight is rising)
    state: str = ""
    incident: str = ""  # id of the open incident about the worker; empty: none is open
    gpus: int = 0
    place: str | None = field(default=None, compare=False)  # the worker that this spare replaces
    last_canary: CanaryView | None = field(default=None, compare=False)
    # this field (a number of requests) and those below come only from a controller's status
    in_flight: int | None = field(default=None, compare=False)
    instance: str = field(default="", compare=False)
    pid: int | None = field(default=None, compare=False)
    # the worker is kept out of service because no other worker of its new lineage has joined
    held: bool = field(default=False, compare=False)
    # the worker is dead, but its process is still running
    lingers: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, worker: Worker) -> Self:
        """Return the view of a worker in the fleet state, without the fields that only a controller's status contains."""
        health, joined, last = worker.health, worker.joined, worker.last_canary
        state = health.status.value
        if health.status is HealthStatus.HEALTHY and worker.spare.kept:
            state = SPARE_STATE
        elif health.status is HealthStatus.HEALTHY and worker.weight < 1.0:
            state = CAPPED if health.weight < health.unlimited else RAMPING
        return cls(
            joined.worker, health.status.value, joined.model, worker.weight, worker.breaker.position, worker.reasons,
            worker.spare.kept, state, worker.incident, len(joined.topology.gpus) or joined.tp * joined.dp, worker.spare.place,
            None if last is None else CanaryView(last.outcome, last.reason, last.latency_ms, last.at),
        )  # fmt: skip

    @property
    def reason(self) -> str:
        """Why the worker is not at full weight, for example because it is a spare; empty if it is at full weight."""
        return "; ".join(self.reasons)

    @property
    def why(self) -> str:
        """Why the worker is not at full weight; empty if the worker is at full weight or is a ready spare."""
        return "; ".join(reason for reason in self.reasons if reason != SPARE)

    @property
    def in_service(self) -> bool:
        """Whether the worker is healthy and at full weight, or is a ready spare."""
        return self.health == HEALTHY and not self.why

    @property
    def urgency(self) -> int:
        """Sort key that puts the workers most in need of attention first: a lower value is more urgent."""
        place = URGENCY.index(self.health) if self.health in URGENCY else len(URGENCY)
        return 2 * place + (not self.why)


def share_of(workers: Iterable[WorkerView]) -> float:
    """Return the share of the fleet that serves, 0 to 1: the mean of the workers' traffic weights.

    A worker with n GPUs counts n times. Spares are ignored. The result is 0 if there are no other workers.
    """
    places = [(one.gpus, one.weight or 0.0) for one in workers if not one.spare]
    whole = sum(gpus for gpus, _ in places)
    return sum(gpus * weight for gpus, weight in places) / whole if whole else 0.0


def counts(workers: Iterable[WorkerView]) -> dict[str, int]:
    """Return the number of workers by health status, HEALTHY first. A status without workers is left out."""
    found = Counter(one.health for one in workers)
    return {health: found[health] for health in URGENCY[-1:] + URGENCY[:-1] if found[health]}


def millis(at: datetime) -> float:
    """Return a time in milliseconds since 1970, the unit of JavaScript, rounded to microseconds."""
    return round(at.timestamp() * 1e3, 3)


# --- a controller's status --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AwaitedView:
    """A worker that has not joined yet, as displays show it."""

    id: str
    model: str | None
    reason: str
    since: str


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One process of Holdfast on the controller's host, as displays show it."""

    name: str
    role: str
    pid: int
    url: str
    console: str = ""

    @property
    def line(self) -> str:
        """Name, role, process id and URL of the process as one line of text."""
        return f"  {self.name:<11} {self.role:<11} pid {self.pid:<8} {self.url}"


@dataclass(frozen=True, slots=True)
class JournalView:
    """The range, size and growth of the journal. A value that is not known is None."""

    last_seq: int | None = None
    first_seq: int | None = None
    bytes: float | None = None
    bytes_max: float | None = None
    bytes_a_day: float | None = None
    days_left: float | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class SpoolView:
    """The size of the spools: local files with facts that the broker has not acknowledged yet."""

    bytes: float = 0  # size of all spools
    bytes_max_each: float | None = None  # maximum size of one spool; None: unknown


@dataclass(frozen=True, slots=True)
class ProjectorView:
    """How far the projector has written the journal's events to the state store. An unknown value is None."""

    position: int | None = None  # sequence number of the last event written
    lag: int | None = None  # number of events not written yet


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """A controller's answer to `status`. Unknown keys are ignored, and missing keys have defaults."""

    workers: Sequence[WorkerView] = ()
    awaited: Sequence[AwaitedView] = ()
    processes: Sequence[ProcessView] = ()
    levels: Mapping[str, int | str] = field(default_factory=dict)
    journal: JournalView = JournalView()
    spool: SpoolView = SpoolView()
    projector: ProjectorView = ProjectorView()
    leader: str | None = None

    @classmethod
    def of(cls, answer: Mapping[str, object]) -> Self:
        """Convert the decoded JSON of a controller's answer.

        Raise `msgspec.ValidationError` if a value has a wrong type.
        """
        return msgspec.convert(answer, cls)
