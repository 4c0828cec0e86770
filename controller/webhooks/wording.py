"""How bad is it, what is it about, and does it end something? What templates for people share.

A `Thread` is what belongs together: a trigger opens it, a resolve ends it. Whatever belongs to an incident is in the incident's
thread, and only the incident's end resolves it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
"""Which page of docs/runbooks a kind belongs to."""
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
    """What people are told besides an event: which fleet it is, and where to look."""

    fleet: str = "holdfast"
    runbooks_url: str = ""  # the folder of the runbooks; empty: no links to them
    console_url: str = ""  # what people look at first, such as a dashboard

    def runbook(self, event: FollowedEvent) -> str:
        """Return where an event's runbook is; empty: there is none."""
        page = RUNBOOKS.get(event.fact.kind())
        return f"{self.runbooks_url.rstrip('/')}/{page}.md" if page and self.runbooks_url else ""


@dataclass(frozen=True, slots=True)
class Thread:
    """What an event belongs to, and what it does to that."""

    key: str
    action: Literal["trigger", "resolve"] | None  # None: it belongs to it, and neither begins nor ends it


def severity(event: FollowedEvent) -> Severity:
    """Return how bad an event is."""
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
    """Return what an event belongs to. One that belongs to nothing else is a thread of its own."""
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
        case o.IntrusionRefused(who=who):
            return f"intrusion:{who}"
        case o.ObserverBlind():
            return "observer_blind"
    return event.id
