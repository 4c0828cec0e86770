"""Severity, thread and runbook of an event, shared by the templates of messages for people.

A `Thread` groups events that belong together: a trigger opens it, a resolve ends it. Events of an incident belong to the
incident's thread, and only the end of the incident resolves it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from controller.webhooks.settings import NotifierSettings
from events import decisions as d
from events import observations as o
from events.fact import Decision
from events.follow import FollowedEvent

Severity = Literal["critical", "error", "warning", "info"]
RUNBOOKS: Mapping[str, str] = {
    "breaker_opened": "HoldfastBreakerFlapping",
    "canary_failed": "HoldfastSilentCorruption",
    "degradation_changed": "HoldfastCapacityDegraded",
    "exposure_unknown": "HoldfastExposureUnknown",
    "golden_disputed": "HoldfastGoldenDisputed",
    "incident_opened": "HoldfastWorkersFailing",
    "intrusion_refused": "HoldfastRefusals",
    "observer_blind": "HoldfastObserverBlind",
    "panic_began": "HoldfastPanic",
    "request_abandoned": "HoldfastStreamsLost",
    "worker_lingered": "HoldfastWorkersLingering",
}
"""The page of docs/operations/runbooks of each kind."""
_ERRORS = (o.ExposureUnknown, o.PanicBegan, o.RequestAbandoned, d.BreakerOpened, d.IncidentOpened)
_WARNINGS = (
    o.GoldenDisputed,
    o.IntrusionRefused,
    o.ObserverBlind,
    o.WorkerLingered,
    o.WorkerSilent,
    o.CanaryFailed,
)
_ENDS = (d.BreakerClosed, d.BreakerHalfOpened, d.DrainEnded, d.IncidentClosed, d.GoldenAgreed, d.GoldenRetired,
         o.PanicEnded, o.DeviceRecovered, o.WorkerHeard, o.WorkerSlowCleared)  # fmt: skip
_UNWELL = (d.HealthStatus.SUSPICIOUS, d.HealthStatus.UNHEALTHY, d.HealthStatus.DEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWording:
    """Details added to an event's message: the fleet's name, and links."""

    fleet: str = "holdfast"
    runbooks_url: str = ""  # the folder of the runbooks; empty: no links to them
    console_url: str = ""  # URL of a console or dashboard

    @classmethod
    def of(cls, settings: NotifierSettings) -> "FleetWording":
        """Return the wording that the settings describe."""
        return cls(fleet=settings.fleet, runbooks_url=settings.runbooks_url, console_url=settings.console_url)

    def runbook(self, event: FollowedEvent) -> str:
        """Return the URL of an event's runbook; empty if there is none."""
        page = RUNBOOKS.get(event.fact.kind())
        return f"{self.runbooks_url.rstrip('/')}/{page}.md" if page and self.runbooks_url else ""


@dataclass(frozen=True, slots=True)
class Thread:
    """The group that an event belongs to, and the event's effect on the group."""

    key: str
    action: Literal["trigger", "resolve"] | None  # None: it neither begins nor ends the thread


def severity(event: FollowedEvent) -> Severity:
    """Return the severity of an event."""
    match event.fact:
        case d.DegradationChanged(after=after):
            return "critical" if after > 2 else "warning" if after else "info"
        case d.HealthChanged(after=after):
            return "error" if after in (d.HealthStatus.UNHEALTHY, d.HealthStatus.DEAD) else "warning"
        case o.CanaryFailed(confirmed=True):
            return "critical"
        case o.DeviceFaulted(fatal=fatal) | o.EngineFaulted(fatal=fatal):
            return "error" if fatal else "warning"
        case fact if isinstance(fact, _ERRORS):
            return "error"
        case fact if isinstance(fact, _WARNINGS):
            return "warning"
    return "info"


def thread(event: FollowedEvent) -> Thread:
    """Return the thread of an event. An event that belongs to no other thread has its own."""
    fact = event.fact
    incident = event.correlation or (fact.incident if isinstance(fact, Decision) else "")
    if incident:
        resolves = isinstance(fact, d.IncidentClosed)
        return Thread(incident, "resolve" if resolves else None if _ends(event) else "trigger")
    return Thread(_key(event), "resolve" if _ends(event) else "trigger")


def _ends(event: FollowedEvent) -> bool:
    match event.fact:
        case d.DegradationChanged(before=before, after=after):
            return after < before
        case d.HealthChanged(after=after):
            return after not in _UNWELL
        case fact:
            return isinstance(fact, _ENDS)


def _key(event: FollowedEvent) -> str:
    match event.fact:
        case (
            o.GoldenDisputed(canary_key=key)
            | d.GoldenAgreed(canary_key=key)
            | d.GoldenRetired(canary_key=key)
        ):
            return f"golden:{key}"
        case o.PanicBegan(frontend=frontend, model=model) | o.PanicEnded(frontend=frontend, model=model):
            return f"panic:{frontend}:{model}"
        case (
            o.DeviceFaulted(device=device, fault_class=fault)
            | o.DeviceRecovered(device=device, fault_class=fault)
        ):
            return f"device:{device}:{fault}"
        case d.DegradationChanged(model=model):
            return f"degradation:{model}"
        case o.WorkerSilent(worker=worker) | o.WorkerHeard(worker=worker):
            return f"silent:{worker}"
        case (
            o.WorkerSlow(worker=worker, frontend=frontend)
            | o.WorkerSlowCleared(worker=worker, frontend=frontend)
        ):
            return f"slow:{worker}:{frontend}"
        case (d.BreakerOpened(worker=worker) | d.BreakerClosed(worker=worker) | d.BreakerHalfOpened(worker=worker)
              | d.HealthChanged(worker=worker) | d.DrainStarted(worker=worker) | d.DrainEnded(worker=worker)):  # fmt: skip
            return f"worker:{worker}"
        case o.ExposureUnknown(worker=worker) | o.WorkerLingered(worker=worker):
            return f"{event.fact.kind()}:{worker}"
        case o.IntrusionRefused(who=source):
            return f"intrusion:{source}"
        case o.ObserverBlind():
            return "observer_blind"
    return event.id
