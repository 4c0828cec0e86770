"""What the console keeps of the events that pass while nobody looks, so that who looks sees what has just been.

It is told of every event of the fleet, on the loop that relays tokens: so it only puts them aside, and counts the few that
hurt somebody. What is made of them waits until somebody looks.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import takewhile

from controller.console.lanes import LaneMemory
from controller.deciders.fleet import Fleet
from controller.deciders.incident import Incident
from events.decisions import IncidentClosed, IncidentOpened, WorkerDecision
from events.fact import Fact, Recorded
from events.observations import (
    RequestAbandoned,
    RequestExposed,
    RequestMigrated,
    RequestsRejected,
    SnapshotKept,
    WorkerJoined,
)

EVENTS_MAX = 4096
ENDED_MAX = 30  # incidents
HARM_OVER = timedelta(minutes=5)
SPELL = timedelta(seconds=10)  # as finely is counted when somebody was hurt
HARM: Mapping[type[Fact], str] = {
    RequestAbandoned: "lost",
    RequestExposed: "exposed",
    RequestsRejected: "refused",
    RequestMigrated: "moved",
}

ABOUT_A_STATE = (WorkerJoined, WorkerDecision)


@dataclass(frozen=True, slots=True)
class EndedIncident:
    """An incident that is over."""

    id: str
    subject: str
    symptom: str  # empty: it was opened before we looked
    opened_at: datetime | None
    closed_at: datetime
    outcome: str


@dataclass(slots=True)
class FlowMemory:
    """The last events, the last incidents that ended, and how many requests were hurt lately."""

    events: deque[Recorded] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    lanes: LaneMemory = field(default_factory=LaneMemory)
    ended: dict[str, EndedIncident] = field(default_factory=dict)  # by id, `ENDED_MAX` at most
    _incidents: Mapping[str, Incident] = field(default_factory=dict)  # that were open after the last batch
    _spells: deque[tuple[datetime, Counter[str]]] = field(default_factory=deque)

    def take(self, fleet: Fleet, batch: Sequence[Recorded]) -> None:
        """Take in a batch of events; `fleet`: as it is after them."""
        moved: dict[str, datetime] = {}
        if batch and not self.events:  # where it begins: all of them, once
            moved = dict.fromkeys(fleet.workers, batch[0].at)
        for event in batch:
            kind = type(event.fact)
            if kind is SnapshotKept:  # it holds a whole fleet
                continue
            self.events.append(event)
            if isinstance(event.fact, ABOUT_A_STATE):
                moved[event.fact.worker] = event.at
            if (harm := HARM.get(kind)) is not None:
                self._spell(event.at)[harm] += getattr(event.fact, "count", 1)
            elif isinstance(event.fact, IncidentClosed):
                self._end(event.fact)
            elif isinstance(event.fact, IncidentOpened):
                one = event.fact  # it may end within this batch
                opened = Incident(one.incident, one.subject, one.symptom, one.decided_at, one.cause)
                self._incidents = {**self._incidents, one.incident: opened}
        self._incidents = fleet.incidents
        for name, at in moved.items():
            self.lanes.note(at, name, fleet.workers.get(name))

    def _end(self, fact: IncidentClosed) -> None:
        known = self._incidents.get(fact.incident)
        symptom, opened_at = (known.symptom, known.opened_at) if known is not None else ("", None)
        self.remember(
            EndedIncident(fact.incident, fact.subject, symptom, opened_at, fact.decided_at, fact.outcome)
        )

    def remember(self, *ended: EndedIncident) -> None:
        """Know of incidents that ended; what was known of one already stays. The latest are kept."""
        known = {one.id: one for one in ended} | self.ended
        latest = sorted(known.values(), key=lambda one: one.closed_at)[-ENDED_MAX:]
        self.ended = {one.id: one for one in latest}

    def precede(self, events: Sequence[Recorded]) -> None:
        """Put events before those that are known, as far as there is room; they hurt nobody that is counted."""
        first = self.events[0].seq if self.events else None
        for event in reversed(events):
            if len(self.events) == EVENTS_MAX:
                return
            if (first is None or event.seq < first) and not isinstance(event.fact, SnapshotKept):
                self.events.appendleft(event)

    def since(self, seq: int) -> list[Recorded]:
        """Return the events after a sequence, in order."""
        return [*takewhile(lambda event: event.seq > seq, reversed(self.events))][::-1]

    def _spell(self, at: datetime) -> Counter[str]:
        if not self._spells or at >= self._spells[-1][0] + SPELL:
            self._spells.append((at, Counter()))
            self._forget(at)
        return self._spells[-1][1]

    def _forget(self, now: datetime) -> None:
        while self._spells and self._spells[0][0] < now - HARM_OVER:
            self._spells.popleft()

    def harm(self, now: datetime) -> Counter[str]:
        """Return how many requests were lost, exposed, refused, moved in the `HARM_OVER` before `now`, by the stream's clock."""
        self._forget(now)
        return sum((count for _, count in self._spells), Counter())
