"""The phases of an incident (noticed, fenced, recovered), compared with those of other incidents.

    noticed     from the first symptom (an injected fault, or the event that the incident was opened for) to its opening
    fenced      from the opening to the first decision after which the worker gets no new requests
    recovered   from the opening to the closing

MTTD is the mean of the first, MTTR of the third.
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

REMEMBERED = 20_000  # number of recent events kept, to look up the times of causes
NAMES = ("noticed", "fenced", "recovered")


@dataclass(slots=True)
class Phases:
    """The phases of one incident. Times are the stream's; None: not reached yet, or unknown."""

    incident: str
    subject: str
    symptom_at: datetime | None
    opened_at: datetime
    fenced_at: datetime | None = None
    closed_at: datetime | None = None

    def seconds(self, phase: str) -> float | None:
        """Return the duration of a phase in seconds; None if it is unknown or not complete."""
        start, end = {
            "noticed": (self.symptom_at, self.opened_at),
            "fenced": (self.opened_at, self.fenced_at),
            "recovered": (self.opened_at, self.closed_at),
        }[phase]
        return (end - start).total_seconds() if start is not None and end is not None else None


@dataclass(slots=True)
class PhaseTimes:
    """The duration of one phase in this incident, and in others."""

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
    """Return the phases of every incident that opens in these events, by its id."""
    found = _Found()
    async for batch in batches:
        for event in batch:
            found.take(event)
    return found.phases


class _Found:
    """Collects the phases while reading events."""

    def __init__(self) -> None:
        self.phases: dict[str, Phases] = {}
        self._times: OrderedDict[str, datetime] = OrderedDict()  # of events, by the name that others use
        self._injected: dict[str, datetime] = {}  # time of the last injected fault, by worker

    def take(self, event: Recorded) -> None:
        """Add an event, in order."""
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
        """Return the time of the first symptom: a fault injected shortly before, or the event that opened the incident."""
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
    """Return whether the worker gets no new requests after this decision."""
    return isinstance(fact, BreakerOpened | DrainStarted) or (
        isinstance(fact, HealthChanged) and fact.weight == 0.0
    )


def compared(story: Story, others: Iterable[Phases]) -> list[PhaseTimes]:
    """Return each phase of one incident, with the same phase of all others."""
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
