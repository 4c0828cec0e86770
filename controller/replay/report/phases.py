"""Measures the phases of an incident, and compares them with those of other incidents.

    noticed     from the first symptom to the opening of the incident
    fenced      from the opening to the first decision after which the worker gets no new requests
    recovered   from the opening to the closing of the incident

If a fault was injected at most 60 s before the opening, the first symptom is this fault. Otherwise the first symptom is the
event for which the incident was opened. The mean of `noticed` over all incidents is the mean time to detection (MTTD). The mean
of `recovered` is the mean time to recovery (MTTR).
"""

from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import mean, median

from controller.replay.event_lookup import cause, name
from controller.replay.timeline import CHAOS_BEFORE, Story
from events.chaos import HEALING
from events.decisions import BreakerOpened, DrainStarted, HealthChanged, IncidentClosed, IncidentOpened
from events.fact import Decision, Recorded
from events.observations import ChaosInjected

# number of recent event times that are kept, so that the time of a cause can be looked up
REMEMBERED = 20_000
NAMES = ("noticed", "fenced", "recovered")


@dataclass(slots=True)
class Phases:
    """The times of one incident's first symptom, opening, fencing and closing, by the broker's clock.

    None means not reached yet, or unknown."""

    incident: str
    subject: str
    symptom_at: datetime | None
    opened_at: datetime
    fenced_at: datetime | None = None
    closed_at: datetime | None = None

    def seconds(self, phase: str) -> float | None:
        """Return the duration of a phase in seconds, or None if its start or end is unknown or not reached yet."""
        start, end = {
            "noticed": (self.symptom_at, self.opened_at),
            "fenced": (self.opened_at, self.fenced_at),
            "recovered": (self.opened_at, self.closed_at),
        }[phase]
        return (end - start).total_seconds() if start is not None and end is not None else None


@dataclass(slots=True)
class PhaseTimes:
    """The duration of one phase in the reported incident and in the other incidents, in seconds.

    `here_s` is None if the reported incident has not completed the phase."""

    phase: str
    here_s: float | None
    others: Sequence[float] = field(default_factory=tuple)

    @property
    def median_s(self) -> float | None:
        return median(self.others) if self.others else None

    @property
    def mean_s(self) -> float | None:
        return mean(self.others) if self.others else None


async def all_phases(batches: AsyncIterator[Sequence[Recorded]]) -> dict[str, Phases]:
    """Return the phases of every incident that is opened in these events, by the id of the incident."""
    found = _Found()
    async for batch in batches:
        for event in batch:
            found.take(event)
    return found.phases


class _Found:
    """Collects the phases of all incidents from events that are added in order."""

    def __init__(self) -> None:
        self.phases: dict[str, Phases] = {}
        # by event name (ce-id or `decision:N`): time of the event
        self._times: OrderedDict[str, datetime] = OrderedDict()
        self._injected: dict[str, datetime] = {}  # by worker: time of the last injected fault

    def take(self, event: Recorded) -> None:
        """Add the next event of the journal."""
        self._times[name(event)] = event.at
        if len(self._times) > REMEMBERED:
            self._times.popitem(last=False)
        match event.fact:
            case ChaosInjected(worker=worker, fault=fault):
                if fault not in HEALING:
                    self._injected[worker] = event.at
            case IncidentOpened(incident=incident, subject=subject):
                self.phases[incident] = Phases(incident, subject, self._symptom(event, subject), event.at)
            case Decision() as fact:
                _take(self.phases, event, fact)
            case _:
                pass

    def _symptom(self, event: Recorded, subject: str) -> datetime | None:
        """Return the time of the first symptom of the incident that an event opens.

        If a fault was injected into the worker at most 60 s before the event, this fault is the first symptom. Otherwise the
        cause of the event is the first symptom. Return None if the cause is not among the last REMEMBERED events."""
        injected = self._injected.pop(subject.partition("worker:")[2], None)
        if injected is not None and event.at - injected <= CHAOS_BEFORE:
            return injected
        return self._times.get(cause(event))


def _take(found: dict[str, Phases], event: Recorded, fact: Decision) -> None:
    phases = found.get(fact.incident)
    if phases is None:
        return
    if isinstance(fact, IncidentClosed):
        phases.closed_at = event.at
    elif phases.fenced_at is None and fences(fact):
        phases.fenced_at = event.at


def fences(fact: Decision) -> bool:
    """Return whether a decision stops new requests to the worker that it is about."""
    return isinstance(fact, BreakerOpened | DrainStarted) or (
        isinstance(fact, HealthChanged) and fact.weight == 0.0
    )


def compared(story: Story, others: Iterable[Phases]) -> list[PhaseTimes]:
    """Return the duration of each phase of an incident, together with its durations in all other incidents.

    An element of `others` that belongs to the incident itself is ignored."""
    found = _Found()
    for event in story.events:
        found.take(event)
    here = found.phases.get(story.incident)
    rest = [one for one in others if one.incident != story.incident]
    return [
        PhaseTimes(
            phase,
            here.seconds(phase) if here is not None else None,
            tuple(took for one in rest if (took := one.seconds(phase)) is not None),
        )
        for phase in NAMES
    ]
