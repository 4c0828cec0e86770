"""Selects the events of a timeline: all events, or those of an incident, a worker or a request."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from controller.ports import Archive
from controller.replay import sentences
from controller.replay.event_lookup import NoSuchEvent, cause, find, name, why
from events import observations as o
from events.chaos import HEALING
from events.decisions import Absorbed, IncidentClosed, IncidentOpened
from events.fact import Decision, Fact, Recorded
from events.journal.port import Journal

# a fault that was injected within this time before the first symptom belongs to the story
CHAOS_BEFORE = timedelta(seconds=60)
LED_WITHIN = 5_000  # number of later events that are searched for a decision that an event caused
# a migration within this time before the first symptom belongs to the story
IMPACT_BEFORE = timedelta(seconds=5)
# a migration within this time after the end belongs to it as well, because a dead worker's streams continue after its death
IMPACT_AFTER = timedelta(seconds=5)
_IMPACT = (o.RequestMigrated, o.RequestAbandoned, o.RequestExposed)
# each of these facts begins the story of another incident or command
_NEXT = (
    o.ChaosInjected,
    IncidentOpened,
    o.DrainRequested,
    o.MoveRequested,
    o.RestartRequested,
    o.ShutdownBegan,
)
_ROUTINE = (o.RequestsServed, o.TrafficReported, Absorbed)
LISTS_ALL = "`holdfast replay timeline` lists all incidents"


@dataclass(frozen=True, slots=True)
class Story:
    """The events of one incident, in the order of the journal, and the outcome of the incident."""

    incident: str
    subject: str
    symptom: str
    events: Sequence[Recorded]
    closed: bool
    outcome: str

    @property
    def recovered_s(self) -> float | None:
        """Seconds from the incident's opening to its closing, by the broker's clock; None while it is open.

        This is the phase `recovered` of a post-mortem (`report.phases`). All displays report it as the incident's duration.
        """
        own = [e for e in self.events if getattr(e.fact, "incident", "") == self.incident]
        opened = [e.at for e in own if isinstance(e.fact, IncidentOpened)]
        closed = [e.at for e in own if isinstance(e.fact, IncidentClosed)]
        return (closed[-1] - opened[0]).total_seconds() if opened and closed else None

    def summary(self) -> dict[str, object]:
        """Return all fields except the events as plain JSON types, with the incident's duration."""
        return {
            "incident": self.incident, "subject": self.subject, "symptom": self.symptom, "closed": self.closed,
            "outcome": self.outcome, "lasted_s": self.recovered_s, "recovered_s": self.recovered_s,
        }  # fmt: skip

    def headline(self) -> str:
        """Return a one-line summary of the incident: subject, symptom, duration and affected requests."""
        moved = [e.fact for e in self.events if isinstance(e.fact, o.RequestMigrated)]
        exposed = sum(isinstance(e.fact, o.RequestExposed) for e in self.events)
        lost = sum(isinstance(e.fact, o.RequestAbandoned) for e in self.events)
        parts = [f"{self.incident}: {sentences.about(self.subject)}, {self.symptom}"]
        took = self.recovered_s
        parts.append(f"{self.outcome} after {sentences.span(took)}" if took is not None else "still open")
        if moved:
            gap = max(fact.gap_ms for fact in moved)
            parts.append(
                f"{sentences.count(len(moved), 'request')} migrated (longest gap {sentences.span(gap / 1000)})"
            )
        parts += [f"{n} {word}" for n, word in ((exposed, "exposed"), (lost, "lost")) if n]
        return "; ".join(parts)


def is_routine(fact: Fact) -> bool:
    """Return whether a fact only reports normal operation. By default, a timeline omits such facts."""
    match fact:
        case o.CanaryPassed(check_type=check):
            return check == "scheduled"
        case o.CapacityReported(provisioned=provisioned, healthy=healthy):
            return healthy == provisioned
        case _:
            return isinstance(fact, _ROUTINE)


async def events(
    archive: Archive,
    *,
    worker: str | None = None,
    request: str | None = None,
    since: int | datetime | None = None,
    routine: bool = False,
) -> AsyncIterator[Recorded]:
    """Yield the events about a worker or request in the order of the journal; all events if neither is given.

    `since` is the first sequence number or time to include. Routine events are left out unless `routine` is set."""
    after = since - 1 if isinstance(since, int) else 0
    start = since if isinstance(since, datetime) else None
    async for batch in archive.select(after=max(0, after), since=start, worker=worker, request=request):
        for event in batch:
            if routine or not is_routine(event.fact):
                yield event


async def story(journal: Journal, archive: Archive, incident: str) -> Story:
    """Return one incident with its events, from shortly before the first symptom to shortly after the end.

    If the incident is still open, the events continue to the newest one. Raise NoSuchEvent if the archive has no incident with
    this id."""
    carried = [e async for batch in archive.select(incident=incident) for e in batch]
    opened = next(((e, e.fact) for e in carried if isinstance(e.fact, IncidentOpened)), None)
    if opened is None:
        raise NoSuchEvent(f"the journal holds no incident {incident!r}; {LISTS_ALL}")
    event, fact = opened
    closed, outcome = next(
        ((e, e.fact.outcome) for e in carried if isinstance(e.fact, IncidentClosed)), (None, "")
    )
    symptom = (await why(journal, archive, str(event.seq)))[-1]
    scene = await _scene(archive, fact.subject, symptom, closed)
    causes = {cause(event) for event in [*carried, *scene]}
    by_seq = {event.seq: event for event in [symptom, *carried]}
    by_seq |= {e.seq: e for e in scene if not is_routine(e.fact) or name(e) in causes}
    ordered = [by_seq[seq] for seq in sorted(by_seq)]
    return Story(incident, fact.subject, fact.symptom, ordered, closed is not None, outcome)


async def _scene(
    archive: Archive, subject: str, symptom: Recorded, closed: Recorded | None
) -> list[Recorded]:
    """Return the events about an incident's worker or model, from shortly before the first symptom to the end.

    For a worker's incident, events after the end that show user impact are also included. They stop 5 s
    (IMPACT_AFTER) after the end, or at the worker's next incident, shutdown, fault injection or operator command, whichever
    comes first.
    """
    kind, _, subject_name = subject.partition(":")
    worker = subject_name if kind == "worker" else None
    here: list[Recorded] = []
    async for batch in archive.select(since=symptom.at - CHAOS_BEFORE, worker=worker):
        here += [e for e in batch if not _came_from_another(e.fact, worker)]
        if closed and batch[-1].at > closed.at + IMPACT_AFTER:
            break
    early = _prelude([e for e in here if e.seq < symptom.seq], symptom.at)
    during = [e for e in here if e.seq >= symptom.seq and _belongs(e, kind, subject_name)]
    if closed is None:
        return early + during
    during = [e for e in during if e.seq <= closed.seq]
    return early + during + (_aftermath([e for e in here if e.seq > closed.seq], closed.at) if worker else [])


def _came_from_another(fact: Fact, worker: str | None) -> bool:
    """Return whether a fact reports that a request moved from another worker to `worker`.

    Such a move is the user impact of the other worker's incident."""
    return (
        isinstance(fact, o.RequestMigrated | o.RequestResumed)
        and worker is not None
        and fact.source != worker
    )


def _aftermath(after: Sequence[Recorded], end: datetime) -> list[Recorded]:
    """Return the events after an incident's end that show the incident's impact on users.

    The events stop 5 s (IMPACT_AFTER) after the end, or at the worker's next incident, shutdown, fault injection or operator
    command, whichever comes first.
    """
    impact: list[Recorded] = []
    for event in after:
        if isinstance(event.fact, _NEXT) or event.at > end + IMPACT_AFTER:
            break
        impact += [event] if isinstance(event.fact, _IMPACT) else []
    return impact


def _prelude(before: Sequence[Recorded], symptom: datetime) -> list[Recorded]:
    """Return the events before an incident's first symptom that belong to the incident.

    The last injected fault belongs to the incident unless the fault ended more than 5 s (IMPACT_BEFORE) before the symptom. If
    the fault belongs to the incident, return its injection, and the migrations and losses of requests since the injection.
    Otherwise, return only the migrations and losses of requests in the 5 s before the symptom. Requests can be affected before
    the symptom, because a frontend often notices a failure first.
    """
    injected: list[Recorded] = []
    for event in before:
        if isinstance(event.fact, o.ChaosInjected):
            if event.fact.fault not in HEALING:
                injected = [event]
            elif event.at < symptom - IMPACT_BEFORE:
                injected = []
    start = injected[0].at if injected else symptom - IMPACT_BEFORE
    impact = [
        e for e in before if isinstance(e.fact, o.RequestMigrated | o.RequestAbandoned) and e.at >= start
    ]
    return injected + impact


def _belongs(event: Recorded, kind: str, subject_name: str) -> bool:
    # the opening and closing of this incident are selected by its id, and those of other incidents belong to other stories
    if kind == "worker":
        return not isinstance(event.fact, IncidentOpened | IncidentClosed)
    return (
        isinstance(event.fact, o.RequestsRejected | Decision)
        and getattr(event.fact, "model", None) == subject_name
    )


async def incident_of(archive: Archive, journal: Journal, reference: str) -> str:
    """Return the id of the incident to which an event belongs.

    `reference` names the event: a sequence number, CloudEvents id or `decision:N`. If `reference` names no event, return
    `reference` unchanged, because it can be the id of an incident. If `reference` names an observation without an incident,
    also return `reference` unchanged. Raise NoSuchEvent for a decision without an incident."""
    try:
        event = await find(journal, archive, reference)
    except NoSuchEvent:
        return reference
    if isinstance(event.fact, Decision):
        if not event.fact.incident:
            raise NoSuchEvent(f"{reference} ({event.fact.kind()}) belongs to no incident; {LISTS_ALL}")
        return event.fact.incident
    return event.correlation or await _led_to(archive, event) or reference


async def _led_to(archive: Archive, before: Recorded) -> str:
    """Return the incident id of the first decision that the event `before` caused, "" if none is found.

    Decisions without an incident are skipped. The search ends after the next LED_WITHIN (5,000) events."""
    looked = 0
    async for batch in archive.select(after=before.seq):
        for event in batch:
            if isinstance(event.fact, Decision) and event.fact.incident and cause(event) == name(before):
                return event.fact.incident
        looked += len(batch)
        if looked > LED_WITHIN:
            break
    return ""
