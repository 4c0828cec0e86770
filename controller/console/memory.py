"""Events that the console keeps while it has no viewers, so that a new viewer sees the recent past.

It receives every event of the fleet on the event loop that relays tokens. Therefore it only stores events, and counts those with
user impact. Everything else is computed when there is a viewer.
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
SPELL = timedelta(seconds=10)  # resolution of the counts of user impact
HARM: Mapping[type[Fact], str] = {
    RequestAbandoned: "lost",
    RequestExposed: "exposed",
    RequestsRejected: "refused",
    RequestMigrated: "moved",
}

ABOUT_A_STATE = (WorkerJoined, WorkerDecision)


@dataclass(frozen=True, slots=True)
class EndedIncident:
    """An incident that has ended."""

    id: str
    subject: str
    symptom: str  # empty: it was opened before this console started
    opened_at: datetime | None
    closed_at: datetime
    outcome: str


@dataclass(slots=True)
class FlowMemory:
    """The latest events, the incidents that ended last, and counts of recent user impact."""

    events: deque[Recorded] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    lanes: LaneMemory = field(default_factory=LaneMemory)
    ended: dict[str, EndedIncident] = field(default_factory=dict)  # by id, `ENDED_MAX` at most
    _incidents: Mapping[str, Incident] = field(default_factory=dict)  # open incidents after the last batch
    _spells: deque[tuple[datetime, Counter[str]]] = field(default_factory=deque)

    def take(self, fleet: Fleet, batch: Sequence[Recorded]) -> None:
        """Add a batch of events; `fleet` is the fold after them."""
        moved: dict[str, datetime] = {}
        if batch and not self.events:  # first batch: record every worker once
            moved = dict.fromkeys(fleet.workers, batch[0].at)
        for event in batch:
            kind = type(event.fact)
            if kind is SnapshotKept:  # it contains a whole fleet
                continue
            self.events.append(event)
            if isinstance(event.fact, ABOUT_A_STATE):
                moved[event.fact.worker] = event.at
            if (harm := HARM.get(kind)) is not None:
                self._spell(event.at)[harm] += getattr(event.fact, "count", 1)
            elif isinstance(event.fact, IncidentClosed):
                self._end(event.fact)
            elif isinstance(event.fact, IncidentOpened):
                one = event.fact  # it may close within this batch
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
        """Add ended incidents, without replacing known ones. Keeps the latest."""
        known = {one.id: one for one in ended} | self.ended
        latest = sorted(known.values(), key=lambda one: one.closed_at)[-ENDED_MAX:]
        self.ended = {one.id: one for one in latest}

    def precede(self, events: Sequence[Recorded]) -> None:
        """Prepend earlier events, as far as there is space. They do not count as user impact."""
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
        """Return the lost, exposed, rejected and migrated requests of the `HARM_OVER` before `now` (stream clock)."""
        self._forget(now)
        return sum((count for _, count in self._spells), Counter())
