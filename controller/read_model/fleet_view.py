"""What every display of a fleet shows: `status`, `top`, the console and post-mortems only format it.

A `WorkerView` comes from the fold (`WorkerView.of`) or from a controller's answer to `status` (`FleetStatus.of`).
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
SPARE_STATE, RAMPING, CAPPED = "SPARE", "RAMPING", "CAPPED"  # states of a healthy worker in a lane
WELL = (HEALTHY, SPARE_STATE)


@dataclass(frozen=True, slots=True)
class CanaryView:
    """The last canary of a worker."""

    outcome: str = ""
    reason: str | None = None
    latency_ms: float | None = None
    at: datetime | None = None

    @property
    def result(self) -> str:
        """Passed, slow, or why it failed."""
        return self.reason or self.outcome


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker, as it is displayed. Fields that a post-mortem does not draw are left out of comparisons."""

    id: str
    health: str
    model: str = ""
    weight: float | None = None  # share of the traffic, 0 to 1
    breaker: str = ""
    reasons: tuple[str, ...] = ()
    spare: bool = False  # the worker waits as a spare and serves no requests
    state: str = ""  # color of its lane: the health; for a healthy worker SPARE, RAMPING (towards its full weight) or CAPPED
    incident: str = ""
    gpus: int = 0
    place: str | None = field(default=None, compare=False)  # the worker that this spare replaces
    last_canary: CanaryView | None = field(default=None, compare=False)
    in_flight: int | None = field(
        default=None, compare=False
    )  # known to the controller, as are the fields below
    instance: str = field(default="", compare=False)
    pid: int | None = field(default=None, compare=False)
    held: bool = field(
        default=False, compare=False
    )  # its lineage is new, and no other worker of it has joined
    lingers: bool = field(default=False, compare=False)  # it is dead, but its process is still running

    @classmethod
    def of(cls, worker: Worker) -> Self:
        """Return the view of a worker of the fold."""
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
        """Why it is not at full weight, or that it is a spare."""
        return "; ".join(self.reasons)

    @property
    def why(self) -> str:
        """Why it is not at full weight; empty also for a spare that is ready."""
        return "; ".join(reason for reason in self.reasons if reason != SPARE)

    @property
    def well(self) -> bool:
        """Whether it is at full weight, or is a spare that is ready."""
        return self.health == HEALTHY and not self.why

    @property
    def urgency(self) -> int:
        """Position in a list that starts with the workers in trouble."""
        place = URGENCY.index(self.health) if self.health in URGENCY else len(URGENCY)
        return 2 * place + (not self.why)


def share_of(workers: Iterable[WorkerView]) -> float:
    """Return the serving share of these workers: their mean weight, weighted by GPUs, without spares."""
    places = [(one.gpus, one.weight or 0.0) for one in workers if not one.spare]
    whole = sum(gpus for gpus, _ in places)
    return sum(gpus * weight for gpus, weight in places) / whole if whole else 0.0


def counts(workers: Iterable[WorkerView]) -> dict[str, int]:
    """Return the number of workers by health, the healthy ones first."""
    found = Counter(one.health for one in workers)
    return {health: found[health] for health in URGENCY[-1:] + URGENCY[:-1] if found[health]}


def millis(at: datetime) -> float:
    """Return a time in milliseconds since 1970, as browsers use it."""
    return round(at.timestamp() * 1e3, 3)


# --- a controller's status --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AwaitedView:
    """A worker that has not joined yet."""

    id: str
    model: str | None
    reason: str
    since: str


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One process of this host."""

    name: str
    role: str
    pid: int
    url: str
    console: str = ""

    @property
    def line(self) -> str:
        """One line of text."""
        return f"  {self.name:<11} {self.role:<11} pid {self.pid:<8} {self.url}"


@dataclass(frozen=True, slots=True)
class JournalView:
    """The journal's range, size and growth, as far as they are known."""

    last_seq: int | None = None
    first_seq: int | None = None
    bytes: float | None = None
    bytes_max: float | None = None
    bytes_a_day: float | None = None
    days_left: float | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class SpoolView:
    """The size of the spools that wait for the journal."""

    bytes: float = 0
    bytes_max_each: float | None = None  # None: unknown


@dataclass(frozen=True, slots=True)
class ProjectorView:
    """How far the state store is."""

    position: int | None = None
    lag: int | None = None


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The answer of a controller to `status`. Unknown keys are ignored, missing ones have defaults."""

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
        """Return the answer's content."""
        return msgspec.convert(answer, cls)
