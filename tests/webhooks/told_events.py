"""Events as the journal yields them to a notifier."""

from datetime import UTC, datetime, timedelta
from typing import Any

from events import decisions as d
from events import observations as o
from events import subjects
from events.fact import Decision, Fact
from events.follow import FollowedEvent

AT = datetime(2026, 1, 1, tzinfo=UTC)
TAKES: dict[str, Any] = {"decided_at": AT}


def event(fact: Fact, number: int = 1, *, after_s: float = 0.0) -> FollowedEvent:
    """Return an event with this fact."""
    at = AT + timedelta(seconds=after_s)
    incident = fact.incident if isinstance(fact, Decision) else ""
    return FollowedEvent(
        f"id-{number}", f"holdfast.{fact.kind()}", "controller:c:1", subjects.subject(fact), at, number, at, incident, "", fact
    )  # fmt: skip


def opened(incident: str = "incident-7", **also: Any) -> d.IncidentOpened:
    return d.IncidentOpened(
        **TAKES, incident=incident, **{"subject": "worker:w1", "symptom": "token_mismatch", **also}
    )


def closed(incident: str = "incident-7") -> d.IncidentClosed:
    return d.IncidentClosed(**TAKES, incident=incident, subject="worker:w1", outcome="recovered")


def breaker(incident: str = "incident-7") -> d.BreakerOpened:
    return d.BreakerOpened(
        **TAKES, incident=incident, worker="w1", instance="i", retry_at=AT, wait_s=60.0, reason="timeout"
    )


def shut(incident: str = "incident-7") -> d.BreakerClosed:
    return d.BreakerClosed(**TAKES, incident=incident, worker="w1", instance="i")


def level(before: int, after: int) -> d.DegradationChanged:
    knobs = d.Knobs()
    return d.DegradationChanged(
        **TAKES, model="sim", before=before, after=after, ratio=0.4, knobs=knobs, capacity_rps=9.0
    )


def panic(ended: bool) -> o.PanicBegan | o.PanicEnded:
    kind = o.PanicEnded if ended else o.PanicBegan
    return kind(frontend="f0", model="sim", routable_share=0.3)


def heard(number: int) -> o.WorkerHeard:
    return o.WorkerHeard(worker="w1", instance=f"i{number}", observer="o")
