"""Keeps recent events for the console while it has no viewers, so that a new viewer sees them.

Every event of the fleet is added on the event loop that relays tokens. To be fast, this module only stores events, records
changes of worker state and counts user impact. Everything else is computed only while there is a viewer.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import takewhile
from typing import TypeVar

from controller.deciders.fleet import Fleet
from controller.deciders.incident import Incident
from controller.read_model.fleet_view import WELL, WorkerView, millis
from events import observations as o
from events.decisions import IncidentClosed, IncidentOpened, WorkerDecision
from events.fact import Fact, Recorded

OVER = timedelta(minutes=10)
LANES_MAX = 40  # maximum number of lanes shown
# maximum number of state changes kept per worker; of the serving share, ten times as many are kept
CHANGES_MAX = 40
SHARE_EVERY_MS = 500.0  # changes of the serving share within this many milliseconds are merged into one

Lane = tuple[tuple[float, str], ...]
T = TypeVar("T")


class LaneMemory:
    """Keeps data for the page's charts: recent changes of each worker's state and of the serving share of the fleet.

    The serving share is the fraction of the fleet's GPUs that serve, each weighted by its worker's weight. Spares are not
    counted.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, deque[tuple[float, str]]] = {}
        # by worker that is not a spare: its GPUs, and its GPUs times its weight
        self._places: dict[str, tuple[int, float]] = {}
        self._whole, self._serving = 0, 0.0
        self._share: deque[tuple[float, float]] = deque(maxlen=10 * CHANGES_MAX)

    def note(self, at: datetime, name: str, worker: WorkerView | None) -> None:
        """Record a worker's state from the time `at` on. `worker` is None if the worker has left the fleet."""
        now = millis(at)
        if worker is None:
            if self._lanes.pop(name, None) is not None and self._place(name, None):
                self._step(now)
            return
        lane = self._lanes.setdefault(name, deque(maxlen=CHANGES_MAX))
        if not lane or lane[-1][1] != worker.state:
            lane.append((now, worker.state))
        place = None if worker.spare else (worker.gpus, worker.gpus * (worker.weight or 0.0))
        if self._place(name, place):
            self._step(now)

    def _place(self, name: str, place: tuple[int, float] | None) -> bool:
        """Set a worker's contribution to the serving share of the fleet. Return whether the contribution has changed.

        `place` is (GPUs, GPUs times weight) of the worker. None removes the contribution."""
        before = self._places.get(name)
        if before == place:
            return False
        for sign, one in ((-1, before), (1, place)):
            if one is not None:
                self._whole, self._serving = self._whole + sign * one[0], self._serving + sign * one[1]
        if place is None:
            del self._places[name]
        else:
            self._places[name] = place
        return True

    def _step(self, now: float) -> None:
        share = round(min(1.0, max(0.0, self._serving / self._whole)), 4) if self._whole else 0.0
        if self._share and now < self._share[-1][0] + SHARE_EVERY_MS:
            self._share[-1] = (self._share[-1][0], share)
        elif not self._share or self._share[-1][1] != share:
            self._share.append((now, share))

    def lanes(self, now: datetime) -> dict[str, Lane]:
        """Return the recent state changes of each worker that was not always healthy in the last `OVER` (10 minutes).

        Each change is (milliseconds since 1970, state). If there are more than `LANES_MAX` such workers, return only those with
        the latest changes."""
        begin, shown = millis(now - OVER), {}
        for name, lane in self._lanes.items():
            if lane[-1][0] > begin or lane[-1][1] not in WELL:
                since = _since(lane, begin)
                if any(state not in WELL for _, state in since):
                    shown[name] = since
        latest = sorted(shown, key=lambda name: shown[name][-1][0], reverse=True)[:LANES_MAX]
        return {name: shown[name] for name in latest}

    def share(self, now: datetime) -> tuple[tuple[float, float], ...]:
        """Return the changes of the fleet's serving share in the `OVER` (10 minutes) before `now`.

        Each change is (milliseconds since 1970, share). The first change may be older: it gives the share at the
        start of the period."""
        return _since(self._share, millis(now - OVER))


def _since(steps: Iterable[tuple[float, T]], begin: float) -> tuple[tuple[float, T], ...]:
    """Return the step that was current at the time `begin`, and all later ones. A step is (start time, value)."""
    known = tuple(steps)
    first = next((n for n, (at, _) in enumerate(known) if at > begin), len(known))
    return known[max(0, first - 1) :]


EVENTS_MAX = 4096  # maximum number of events kept
ENDED_MAX = 30  # maximum number of ended incidents kept
HARM_OVER = timedelta(minutes=5)  # time over which user impact is counted
SPELL = timedelta(seconds=10)  # resolution of the counts of user impact
HARM: Mapping[type[Fact], str] = {
    o.RequestAbandoned: "lost",
    o.RequestExposed: "exposed",
    o.RequestsRejected: "refused",
    o.RequestMigrated: "moved",
}

ABOUT_A_STATE = (o.WorkerJoined, WorkerDecision)


@dataclass(frozen=True, slots=True)
class EndedIncident:
    """An incident that has ended."""

    id: str
    subject: str
    symptom: str  # empty: unknown, because the incident was opened before this console started
    opened_at: datetime | None
    closed_at: datetime
    outcome: str


@dataclass(slots=True)
class FlowMemory:
    """Keeps the latest events, incidents that ended recently, changes of worker state, and counts of recent user impact."""

    events: deque[Recorded] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    lanes: LaneMemory = field(default_factory=LaneMemory)
    ended: dict[str, EndedIncident] = field(default_factory=dict)  # by incident id, at most `ENDED_MAX`
    # open incidents by id, after the last events added
    _incidents: Mapping[str, Incident] = field(default_factory=dict)
    _spells: deque[tuple[datetime, Counter[str]]] = field(default_factory=deque)

    def take(self, fleet: Fleet, batch: Sequence[Recorded]) -> None:
        """Add the next events of the journal. `fleet` is the fleet state after these events."""
        moved: dict[str, datetime] = {}
        if batch and not self.events:  # these are the first events, so every worker's state is recorded
            moved = dict.fromkeys(fleet.workers, batch[0].at)
        for event in batch:
            kind = type(event.fact)
            if kind is o.SnapshotKept:  # too large to keep, because the event contains a whole fleet
                continue
            self.events.append(event)
            if isinstance(event.fact, ABOUT_A_STATE):
                moved[event.fact.worker] = event.at
            if (harm := HARM.get(kind)) is not None:
                self._spell(event.at)[harm] += getattr(event.fact, "count", 1)
            elif isinstance(event.fact, IncidentClosed):
                self._end(event.fact)
            elif isinstance(event.fact, IncidentOpened):
                one = event.fact  # added now, because the incident may close within the same events
                opened = Incident(one.incident, one.subject, one.symptom, one.decided_at, one.cause)
                self._incidents = {**self._incidents, one.incident: opened}
        self._incidents = fleet.incidents
        for name, at in moved.items():
            worker = fleet.workers.get(name)
            self.lanes.note(at, name, None if worker is None else WorkerView.of(worker))

    def _end(self, fact: IncidentClosed) -> None:
        known = self._incidents.get(fact.incident)
        symptom, opened_at = (known.symptom, known.opened_at) if known is not None else ("", None)
        self.remember(
            EndedIncident(fact.incident, fact.subject, symptom, opened_at, fact.decided_at, fact.outcome)
        )

    def remember(self, *ended: EndedIncident) -> None:
        """Add ended incidents, and keep the `ENDED_MAX` that ended last. An incident that is already kept is not replaced."""
        known = {one.id: one for one in ended} | self.ended
        latest = sorted(known.values(), key=lambda one: one.closed_at)[-ENDED_MAX:]
        self.ended = {one.id: one for one in latest}

    def precede(self, events: Sequence[Recorded]) -> None:
        """Add the events that are older than all kept events, latest first, until `EVENTS_MAX` events are kept.

        The added events do not count as user impact."""
        first = self.events[0].seq if self.events else None
        for event in reversed(events):
            if len(self.events) == EVENTS_MAX:
                return
            if (first is None or event.seq < first) and not isinstance(event.fact, o.SnapshotKept):
                self.events.appendleft(event)

    def since(self, seq: int) -> list[Recorded]:
        """Return the kept events after a sequence number, in order."""
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
        """Return how many requests were lost, exposed, rejected or migrated in the `HARM_OVER` (5 minutes) before `now`.

        Exposed requests received tokens of a worker that was later convicted of wrong answers. The keys are `lost`, `exposed`,
        `refused` (rejected) and `moved` (migrated). `now` is a time by the broker's clock."""
        self._forget(now)
        return sum((count for _, count in self._spells), Counter())
