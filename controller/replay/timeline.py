"""What happened? One incident from its first symptom to recovery, or everything about a worker, in words."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from controller.ports import Archive
from controller.replay import sentences
from controller.replay.find import NoSuchEvent, cause, find, name
from controller.replay.why import why
from events.chaos import HEALING
from events.decisions import Absorbed, IncidentClosed, IncidentOpened
from events.fact import Decision, Fact, Recorded
from events.journal.port import Journal
from events.observations import (
    CanaryPassed,
    CapacityReported,
    ChaosInjected,
    DrainRequested,
    MoveRequested,
    RequestAbandoned,
    RequestExposed,
    RequestMigrated,
    RequestResumed,
    RequestsRejected,
    RequestsServed,
    RestartRequested,
    ShutdownBegan,
    TrafficReported,
)

CHAOS_BEFORE = timedelta(
    seconds=60
)  # a rehearsed fault this long before the first symptom is where the story begins
LED_WITHIN = 5_000  # events: what is decided for an event is decided soon
FELT_BEFORE = timedelta(seconds=5)  # a migration this long before the first symptom belongs to it
FELT_AFTER = timedelta(
    seconds=5
)  # and one this long after the end: a death is known before its streams go on
_FELT = (RequestMigrated, RequestAbandoned, RequestExposed)
_NEXT = (
    ChaosInjected,
    IncidentOpened,
    DrainRequested,
    MoveRequested,
    RestartRequested,
    ShutdownBegan,
)  # another story begins
_ROUTINE = (RequestsServed, TrafficReported, Absorbed)


@dataclass(frozen=True, slots=True)
class Story:
    """The events of one incident, in order, and what it amounts to."""

    incident: str
    subject: str
    symptom: str
    events: Sequence[Recorded]
    closed: bool
    outcome: str

    @property
    def recovered_s(self) -> float | None:
        """Seconds from the opening of the incident to its closing, by the stream's clock; None: it is open.

        It is the phase `recovered` of a post-mortem (`report.phases`), and the only duration of an incident.
        """
        opened = [
            e.at
            for e in self.events
            if isinstance(e.fact, IncidentOpened) and e.fact.incident == self.incident
        ]
        closed = [
            e.at
            for e in self.events
            if isinstance(e.fact, IncidentClosed) and e.fact.incident == self.incident
        ]
        return (closed[-1] - opened[0]).total_seconds() if opened and closed else None

    def headline(self) -> str:
        """Return the story in one line."""
        moved = [e.fact for e in self.events if isinstance(e.fact, RequestMigrated)]
        exposed = sum(isinstance(e.fact, RequestExposed) for e in self.events)
        lost = sum(isinstance(e.fact, RequestAbandoned) for e in self.events)
        said = [f"{self.incident}: {sentences.about(self.subject)}, {self.symptom}"]
        took = self.recovered_s
        said.append(f"{self.outcome} after {sentences.span(took)}" if took is not None else "not over yet")
        if moved:
            gap = max(fact.gap_ms for fact in moved)
            said.append(
                f"{sentences.count(len(moved), 'request')} migrated (longest gap {sentences.span(gap / 1000)})"
            )
        said += [f"{n} {word}" for n, word in ((exposed, "exposed"), (lost, "lost")) if n]
        return "; ".join(said)


def is_routine(fact: Fact) -> bool:
    """Return whether a fact says only that all goes on as it should."""
    match fact:
        case CanaryPassed(check_type=check):
            return check == "scheduled"
        case CapacityReported(provisioned=provisioned, healthy=healthy):
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
    """Yield what happened, in order; without what is routine unless it is asked for."""
    after = since - 1 if isinstance(since, int) else 0
    start = since if isinstance(since, datetime) else None
    async for batch in archive.select(after=max(0, after), since=start, worker=worker, request=request):
        for event in batch:
            if routine or not is_routine(event.fact):
                yield event


async def story(journal: Journal, archive: Archive, incident: str) -> Story:
    """Return one incident from its first symptom to its end. Raise NoSuchEvent if there is no such incident."""
    carried = [e async for batch in archive.select(incident=incident) for e in batch]
    opened = next((e for e in carried if isinstance(e.fact, IncidentOpened)), None)
    if opened is None:
        raise NoSuchEvent(
            f"the journal holds no incident {incident!r}; `holdfast replay timeline` shows all of them"
        )
    assert isinstance(opened.fact, IncidentOpened)
    closed = next((e for e in carried if isinstance(e.fact, IncidentClosed)), None)
    symptom = (await why(journal, archive, str(opened.seq)))[-1]
    scene = await _scene(archive, opened.fact.subject, symptom, closed)
    causes = {cause(event) for event in [*carried, *scene]}
    told = {event.seq: event for event in [symptom, *carried]}
    told |= {e.seq: e for e in scene if not is_routine(e.fact) or name(e) in causes}
    outcome = closed.fact.outcome if closed and isinstance(closed.fact, IncidentClosed) else ""
    ordered = [told[seq] for seq in sorted(told)]
    return Story(incident, opened.fact.subject, opened.fact.symptom, ordered, closed is not None, outcome)


async def _scene(
    archive: Archive, subject: str, symptom: Recorded, closed: Recorded | None
) -> list[Recorded]:
    """Return what concerns an incident's subject, from a little before the first symptom to the end.

    What users felt is told for a few seconds more, unless the subject's next trouble begins, or somebody empties it.
    """
    kind, _, who = subject.partition(":")
    worker = who if kind == "worker" else None
    found: list[Recorded] = []
    late: list[Recorded] = []
    async for batch in archive.select(since=symptom.at - CHAOS_BEFORE, worker=worker):
        here = [e for e in batch if not _came_from_another(e.fact, worker)]
        found += [e for e in here if closed is None or e.seq <= closed.seq]
        late += [e for e in here if closed and e.seq > closed.seq]
        if closed and batch[-1].at > closed.at + FELT_AFTER:
            break
    early = _prelude([e for e in found if e.seq < symptom.seq], symptom.at)
    during = [e for e in found if e.seq >= symptom.seq and _belongs(e, kind, who)]
    return early + during + (_aftermath(late, closed.at) if closed and worker else [])


def _came_from_another(fact: Fact, worker: str | None) -> bool:
    """Return whether a request went on at this worker: that is what users felt of another one's incident."""
    return isinstance(fact, RequestMigrated | RequestResumed) and worker is not None and fact.source != worker


def _aftermath(after: Sequence[Recorded], end: datetime) -> list[Recorded]:
    """Return what users felt of an incident when it was over already."""
    told: list[Recorded] = []
    for event in after:
        if isinstance(event.fact, _NEXT) or event.at > end + FELT_AFTER:
            break
        told += [event] if isinstance(event.fact, _FELT) else []
    return told


def _prelude(before: Sequence[Recorded], symptom: datetime) -> list[Recorded]:
    """Return what belongs to an incident from before its first symptom.

    That is the fault that was played last, if one was and was not healed long before, and what users felt since then:
    a frontend often notices first. Without a played fault it is what they felt in the last moments.
    """
    played: list[Recorded] = []
    for event in before:
        if isinstance(event.fact, ChaosInjected):
            if event.fact.fault not in HEALING:
                played = [event]
            elif event.at < symptom - FELT_BEFORE:
                played = []
    start = played[0].at if played else symptom - FELT_BEFORE
    felt = [e for e in before if isinstance(e.fact, RequestMigrated | RequestAbandoned) and e.at >= start]
    return played + felt


def _belongs(event: Recorded, kind: str, who: str) -> bool:
    if kind == "worker":  # an incident's own opening and closing carry its id; another's are another story
        return not isinstance(event.fact, IncidentOpened | IncidentClosed)
    return isinstance(event.fact, RequestsRejected | Decision) and getattr(event.fact, "model", None) == who


async def incident_of(archive: Archive, journal: Journal, reference: str) -> str:
    """Return the incident that an event belongs to, by any name of the event; the reference itself if it is none."""
    try:
        event = await find(journal, archive, reference)
    except NoSuchEvent:
        return reference
    if isinstance(event.fact, Decision):
        return event.fact.incident
    return event.correlation or await _led_to(archive, event) or reference


async def _led_to(archive: Archive, before: Recorded) -> str:
    """Return the incident to which a decision belongs that was made for an event; empty: there was none soon."""
    looked = 0
    async for batch in archive.select(after=before.seq):
        for event in batch:
            if isinstance(event.fact, Decision) and event.fact.incident and cause(event) == name(before):
                return event.fact.incident
        looked += len(batch)
        if looked > LED_WITHIN:
            break
    return ""
