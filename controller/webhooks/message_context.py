"""Severity, thread and runbook of an event, for the templates of messages for people.

A `Thread` groups events that belong together. An event with the action "trigger" opens its thread, and one with the action
"resolve" ends it. All events of an incident belong to one thread, which only the end of the incident resolves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from controller.webhooks.settings import NotifierSettings
from events import decisions as d
from events import observations as o
from events.fact import Decision, Fact
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
"""The name of the page in docs/operations/runbooks, by the event's kind."""
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
_THREADS: Mapping[type[Fact], tuple[str, ...]] = {
    kind: named
    for named, kinds in {
        ("golden", "canary_key"): (o.GoldenDisputed, d.GoldenAgreed, d.GoldenRetired),
        ("panic", "frontend", "model"): (o.PanicBegan, o.PanicEnded),
        ("device", "device", "fault_class"): (o.DeviceFaulted, o.DeviceRecovered),
        ("degradation", "model"): (d.DegradationChanged,),
        ("silent", "worker"): (o.WorkerSilent, o.WorkerHeard),
        ("slow", "worker", "frontend"): (o.WorkerSlow, o.WorkerSlowCleared),
        ("worker", "worker"): (
            d.BreakerOpened, d.BreakerClosed, d.BreakerHalfOpened, d.HealthChanged, d.DrainStarted, d.DrainEnded,
        ),
        ("exposure_unknown", "worker"): (o.ExposureUnknown,),
        ("worker_lingered", "worker"): (o.WorkerLingered,),
        ("intrusion", "who"): (o.IntrusionRefused,),
        ("observer_blind",): (o.ObserverBlind,),
    }.items()
    for kind in kinds
}  # fmt: skip
"""How to build the key of a thread outside incidents, by the event's kind: a prefix, then the names of the fact's fields."""
_UNWELL = (d.HealthStatus.SUSPICIOUS, d.HealthStatus.UNHEALTHY, d.HealthStatus.DEAD)


def runbook(event: FollowedEvent, settings: NotifierSettings) -> str:
    """Return the URL of an event's runbook. Return "" if the event's kind has no runbook, or if no base URL is configured."""
    page = RUNBOOKS.get(event.fact.kind())
    return f"{settings.runbooks_url.rstrip('/')}/{page}.md" if page and settings.runbooks_url else ""


@dataclass(frozen=True, slots=True)
class Thread:
    """The group that an event belongs to, and the event's effect on the group."""

    key: str
    action: Literal["trigger", "resolve"] | None  # None: the event neither opens nor ends the thread


def severity(event: FollowedEvent) -> Severity:
    """Return how severe an event is, in PagerDuty's terms."""
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
    """Return the thread that an event belongs to. An event without related events has its own thread."""
    fact = event.fact
    incident = event.correlation or (fact.incident if isinstance(fact, Decision) else "")
    if incident:
        resolves = isinstance(fact, d.IncidentClosed)
        return Thread(incident, "resolve" if resolves else None if _ends(event) else "trigger")
    prefix, *names = _THREADS.get(type(fact), ("",))
    key = ":".join((prefix, *(str(getattr(fact, name)) for name in names))) if prefix else event.id
    return Thread(key, "resolve" if _ends(event) else "trigger")


def _ends(event: FollowedEvent) -> bool:
    match event.fact:
        case d.DegradationChanged(before=before, after=after):
            return after < before
        case d.HealthChanged(after=after):
            return after not in _UNWELL
        case fact:
            return isinstance(fact, _ENDS)
