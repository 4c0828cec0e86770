"""Reads a part of the journal into a recording, the input of many what-if simulations.

Nearly all events of a journal are passed canaries, which change nothing about a healthy worker. Canary results are therefore
kept as numbers (`journal_stretch`) and turned into facts again when a simulation needs them (`canary_schedule`).

All recorded decisions are kept for comparison. Of these, a simulation applies only the decisions about goldens and policies.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from statistics import median

from controller.deciders.fleet import Fleet, evolve
from controller.replay import travel
from controller.replay.event_lookup import FleetHistory
from controller.replay.timeline import Story
from controller.replay.whatif.journal_stretch import (
    GOOD,
    SERVED_AFTER_S,
    Adverse,
    RecordedCanaries,
    StretchRead,
)
from controller.replay.whatif.reading import in_one, stretches
from controller.replay.whatif.weights import Weights
from controller.runtime.bounded_read import history
from controller.runtime.initial_fold import oldest, order_from
from events import decisions as d
from events import observations as o
from events.fact import Decision, Fact, Recorded
from events.journal.port import Journal

# used if the recording has too few canaries or silences to infer the values
USUAL_INTERVAL_S, USUAL_SILENCE_S = 30.0, 3.0
LATE_S = 1.5  # seconds by which an observer's report of a silence may be late
LEAST_GAPS = 8  # minimum number of gaps between canaries from which the interval is inferred

BEFORE = timedelta(seconds=60)  # how much of the journal is read before an incident
# how much is read after an incident, because recovery may take longer under another policy
AFTER = timedelta(minutes=10)
GIVEN = (d.GoldenAgreed, d.GoldenRetired)  # decisions that a course applies as recorded


@dataclass(frozen=True, slots=True)
class RecordedFact:
    """One recorded fact that a what-if simulation applies. `at` is in seconds since 1970, by the broker's clock."""

    at: float
    fact: Fact
    id: str


@dataclass(slots=True)
class Recording:
    """A part of the journal in the form that what-if simulations read. Times are seconds since 1970."""

    fleet: Fleet  # the fleet before the first event
    weights: Weights  # the recorded weights
    start: float = 0.0
    end: float = 0.0
    events: int = 0
    # applied by every course, in the order of the journal
    happened: list[RecordedFact] = field(default_factory=list)
    canaries: dict[tuple[str, str], RecordedCanaries] = field(default_factory=dict)  # by worker and instance
    adverse: dict[str, list[Adverse]] = field(default_factory=lambda: defaultdict(list))  # by worker
    decided: list[Decision] = field(default_factory=list)
    # when each decision was recorded, and its number
    numbers: list[tuple[float, int]] = field(default_factory=list)
    # by worker: time and id of each incident that was opened
    incidents: dict[str, list[tuple[float, str]]] = field(default_factory=lambda: defaultdict(list))
    # by worker: when each RequestExposed was recorded
    exposed: dict[str, list[float]] = field(default_factory=dict)
    # by worker: number of answers served, and the seconds over which they were counted
    served: dict[str, tuple[int, float]] = field(default_factory=dict)
    # seconds between scheduled canaries of a worker, inferred from the recording
    interval_s: float = USUAL_INTERVAL_S
    silence_s: float = USUAL_SILENCE_S  # seconds of the silence timeout, inferred from the recording
    # by worker and instance: when the instance was declared DEAD
    dead: dict[tuple[str, str], float] = field(default_factory=dict)
    late_s: float = 0.0  # usual seconds by which a decision follows the time at which a timer made it due

    @property
    def policy(self) -> Mapping[str, object]:
        """The policy in force at the beginning or, without one, the first policy adopted later.

        An empty mapping means the defaults."""
        if self.fleet.policy is not None:
            return self.fleet.policy
        adopted = (one.fact.policy for one in self.happened if isinstance(one.fact, d.PolicyAdopted))
        return next(adopted, {})


async def recorded(fleet: Fleet, parts: AsyncIterator[StretchRead]) -> Recording | None:
    """Build a recording from consecutive parts of the journal. Return None if they have no events.

    `fleet` is the fleet state before the first part. Raise TooMuch if the parts have too many events.
    """
    folding = _Folding(fleet)
    async for part in parts:
        folding.take(part)
    return folding.whole()


class _Folding:
    """Collects consecutive parts of the journal into one recording.

    Also folds the fleet state from these parts, to record each change of a worker's traffic weight."""

    def __init__(self, fleet: Fleet) -> None:
        self._made = Recording(fleet, Weights(fleet))
        self._shown = fleet
        self._gathered = StretchRead()
        self._failed_at: dict[str, float] = {}
        self._silences: list[float] = []
        # when an instance ended, if not because of a DEAD decision
        self._ends: dict[tuple[str, str], float] = {}
        self._retry_at: dict[str, float] = {}  # by worker: when its open breaker may half-open
        # How late decisions follow the time at which a timer made them due. This is measured on breakers, because a
        # BreakerOpened decision carries the time at which the breaker may half-open.
        self._late: list[float] = []

    def take(self, part: StretchRead) -> None:
        """Add the next part of the journal. Raise TooMuch if the recording then has too many events."""
        self._gathered.add(part)
        for event in part.rest:
            at, fact = event.at.timestamp(), event.fact
            if isinstance(fact, o.RequestsServed):
                if at - self._failed_at.get(fact.worker, float("-inf")) < SERVED_AFTER_S:
                    self._made.happened.append(RecordedFact(at, fact, event.id))
            elif isinstance(fact, Decision):
                self._decision(at, event, fact)
            else:
                self._world(at, event, fact)

    def _decision(self, at: float, event: Recorded, fact: Decision) -> None:
        self._fold(at, event, fact)
        self._made.numbers.append((at, fact.number))
        if isinstance(fact, GIVEN):
            self._made.happened.append(RecordedFact(at, fact, event.id))
        if isinstance(fact, d.IncidentOpened):
            kind, _, name = fact.subject.partition(":")
            if kind == "worker":
                self._made.incidents[name].append((at, fact.incident))
        if isinstance(fact, d.HealthChanged) and fact.after is d.HealthStatus.DEAD:
            self._made.dead[fact.worker, fact.instance] = at
        if isinstance(fact, d.BreakerOpened):
            self._retry_at[fact.worker] = fact.retry_at.timestamp()
        if isinstance(fact, d.BreakerHalfOpened) and fact.worker in self._retry_at:
            self._late.append(max(0.0, at - self._retry_at.pop(fact.worker)))
        if isinstance(fact, d.PolicyAdopted):
            self._made.happened.append(RecordedFact(at, fact, event.id))
        else:
            self._made.decided.append(fact)

    def _world(self, at: float, event: Recorded, fact: Fact) -> None:
        self._made.happened.append(RecordedFact(at, fact, event.id))
        before = self._shown.workers.get(getattr(fact, "worker", ""))
        self._fold(at, event, fact)
        match fact:
            case o.RequestFailed():
                self._failed_at[fact.worker] = at
                self._made.adverse[fact.worker].append(Adverse(at, f"requests: {fact.reason}"))
            case o.WorkerSilent():
                self._silences.append(fact.silent_s)
                self._made.adverse[fact.worker].append(Adverse(at, "silent"))
            case o.DeviceFaulted(fatal=True) | o.EngineFaulted(fatal=True):
                what = fact.fault_class if isinstance(fact, o.DeviceFaulted) else f"engine: {fact.reason}"
                self._made.adverse[fact.worker].append(Adverse(at, what))
            case o.WorkerLeft():
                if fact.mode != "graceful":
                    self._made.adverse[fact.worker].append(Adverse(at, f"left: {fact.mode}"))
                self._over(fact.worker, fact.instance, at)
            case o.WorkerJoined():
                if before is not None and before.joined.instance != fact.instance:
                    self._over(fact.worker, before.joined.instance, at)
            case _:
                pass

    def _fold(self, at: float, event: Recorded, fact: Fact) -> None:
        """Add an event to the fleet state, and record the weights of the workers that the event can affect.

        Only decisions and joins change weights. Canary results and requests do not."""
        self._shown = evolve(self._shown, event)
        if isinstance(fact, d.SpareActivated | d.SpareReleased):
            for name, worker in self._shown.workers.items():
                self._made.weights.note(at, name, worker)
        elif isinstance(fact, d.WorkerDecision | o.WorkerJoined):
            self._made.weights.note(at, fact.worker, self._shown.workers.get(fact.worker))

    def _over(self, worker: str, instance: str, at: float) -> None:
        """Record when an instance ended.

        If a DEAD decision caused the end, the end is ignored, because a simulation can make that decision later or never."""
        life = (worker, instance)
        if life not in self._made.dead:
            self._ends[life] = min(self._ends.get(life, at), at)

    def whole(self) -> Recording | None:
        """Return the recording of all added parts of the journal, or None if they have no events."""
        found = self._gathered
        if found.start is None:
            return None
        for life, canaries in found.canaries.items():
            canaries.end = self._ends.get(life, canaries.end)
            for place, source in enumerate(found.askers[life]):
                canaries.sent[place] = min(canaries.at[place], canaries.sent[place] + found.skew[source])
        for worker, adverse in found.wrong.items():
            self._made.adverse[worker] = sorted([*self._made.adverse[worker], *adverse], key=attrgetter("at"))
        return replace(
            self._made,
            start=found.start,
            end=found.end,
            events=found.events,
            canaries=found.canaries,
            exposed=dict(found.exposed),
            served=found.served,
            interval_s=_interval(found.canaries.values()),
            silence_s=_silence(self._silences),
            late_s=median(self._late) if self._late else 0.0,
        )


def _interval(lives: Iterable[RecordedCanaries]) -> float:
    """Return the median time in seconds between two scheduled canaries of a worker.

    If too few canaries were recorded, return a default."""
    gaps = [
        canaries.sent[n] - canaries.sent[n - 1]
        for canaries in lives
        for n in range(1, min(len(canaries), 200))
        if canaries.check[n] == 0 == canaries.check[n - 1] and canaries.said[n] == GOOD
    ]
    return median(gaps) if len(gaps) >= LEAST_GAPS else USUAL_INTERVAL_S


def _silence(seconds: Sequence[float]) -> float:
    """Return the silence timeout in seconds, inferred from the lengths of the recorded silences.

    If no silence was recorded, or if the shortest one exceeds the default timeout by less than LATE_S, return the default
    timeout. Otherwise return the shortest silence."""
    least = min(seconds, default=USUAL_SILENCE_S)
    return USUAL_SILENCE_S if USUAL_SILENCE_S <= least < USUAL_SILENCE_S + LATE_S else least


def instant(at: float) -> datetime:
    """Convert a time in seconds since 1970 to a datetime, the type that facts use."""
    return datetime.fromtimestamp(at, UTC)


# --- selection of the part of the journal that is decided again -------------------------------------------------------


async def of_incident(history: FleetHistory, story: Story) -> Recording | None:
    """Read the part of the journal around one incident, or return None if that part has no events.

    Raise TooMuch or NoLonger as `between` does."""
    first, last = story.events[0].at, story.events[-1].at
    return await between(history, first - BEFORE, last + max(AFTER, 2 * (last - first)))


async def between(
    history: FleetHistory, since: int | datetime, until: int | datetime | None
) -> Recording | None:
    """Read the part of the journal from `since` to `until`, both included, as sequence numbers or times.

    `until` None means the end of the journal. Return None if the part has no events. Raise TooMuch if it has too many, or
    NoLonger if the fleet state before it cannot be restored."""
    journal = history.journal
    last = await journal.last_seq()
    first: int | None = since if isinstance(since, int) else None
    if isinstance(since, datetime):
        async for batch in history.archive.select(since=since):
            first = batch[0].seq
            break
    if first is None or first > last:
        return None
    if isinstance(since, int) and 1 < first <= await journal.first_seq():
        order = order_from(await oldest(journal, first - 1))  # the broker has dropped the earlier events
    else:
        order = await travel.order_at(journal, history.store, max(1, first) - 1)
    end = min(last, until) if isinstance(until, int) else last
    decided = order.position.decided
    if not isinstance(until, datetime):
        return await recorded(order.shown, stretches(journal, order.last_seq, end, decided))
    return await recorded(order.shown, in_one(_until(journal, order.last_seq, end, until), decided))


async def _until(
    journal: Journal, after: int, end: int, until: datetime
) -> AsyncIterator[Sequence[Recorded]]:
    async for batch in history(journal, after, end):
        if batch[-1].at > until:
            yield [event for event in batch if event.at <= until]
            return
        yield batch
