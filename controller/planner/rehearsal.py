"""Simulates a recorded day with the planner, and reports the changes, the cost and the late requests.

Two other fleets are simulated for comparison. The first has a fixed size. The second has perfect knowledge: every five minutes
it is resized for the traffic to come. Its size includes a margin, the smallest with which the share of late requests is within
the policy's limit.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import ceil

from controller.planner.fleet_model import DayFigures, FleetModel
from controller.planner.plan import Change, ModelView, PlannerPolicy, plan
from controller.planner.sizing import BIN_S, Minute, Objectives, Traffic, needed
from controller.trace.rows import TraceRow
from events.observations import Profile

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
STEP_BINS = 5  # bins per step of perfect knowledge
GOLDEN = 0.6180339887498949
SPREAD_S = 30.0  # seconds over which copies of a request are spread
SCALE_MAX, SCALE_STEPS = 1e6, 24
MARGINS = tuple(n / 100 for n in range(-60, 200, 2))  # margins tried by perfect knowledge

Scale = Callable[[float, Sequence[Minute]], int | None]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a day, with the lengths of its prompt and answer in tokens."""

    at: float  # seconds
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedFleet:
    """The workers' profile, the objectives and the policy of a simulated day."""

    profile: Profile
    objectives: Objectives
    policy: PlannerPolicy


def scaled(rows: Iterable[TraceRow], factor: float) -> list[Arrival]:
    """Return the requests of a trace, with their number multiplied by `factor`.

    The copies of one request are spread over SPREAD_S seconds.
    """
    found = []
    for number, row in enumerate(rows):
        copies = int(factor) + ((number * GOLDEN) % 1.0 < factor % 1.0)
        for copy in range(copies):
            later = ((number + copy * 7919) * GOLDEN) % 1.0 * SPREAD_S if copies > 1 else 0.0
            found.append(Arrival(row.timestamp / 1000 + later, row.input_length, max(1, row.output_length)))
    return sorted(found, key=lambda one: one.at)


def most_needed(fleet: RehearsedFleet, arrivals: Sequence[Arrival]) -> int:
    """Return the number of workers that the traffic of the busiest minute needs."""
    return _most(fleet, by_minute(arrivals), 1.0)


def scale_for(fleet: RehearsedFleet, rows: Sequence[TraceRow], workers: int) -> float:
    """Return the largest factor for `scaled` at which the busiest minute needs at most `workers` workers."""
    minutes = by_minute(scaled(rows, 1.0))
    low, high = 0.0, 1.0
    while high < SCALE_MAX and _most(fleet, minutes, high) <= workers:
        high *= 2
    for _ in range(SCALE_STEPS):
        middle = (low + high) / 2
        if _most(fleet, minutes, middle) > workers:
            high = middle
        else:
            low = middle
    return low


def _most(fleet: RehearsedFleet, minutes: Sequence[Traffic], factor: float) -> int:
    """Return the number of workers that the busiest minute needs if its traffic is multiplied by `factor`."""
    each = (needed(minute.times(factor), fleet.profile, fleet.objectives) for minute in minutes)
    return max(each, default=0)


def by_minute(arrivals: Sequence[Arrival]) -> list[Traffic]:
    """Return the traffic of each minute, from the first minute of the day to the last arrival."""
    if not arrivals:
        return []
    bins: list[list[tuple[int, int]]] = [[] for _ in range(int(arrivals[-1].at // BIN_S) + 1)]
    for one in arrivals:
        bins[int(one.at // BIN_S)].append((one.prompt, one.answer))
    return [Traffic.of(each) for each in bins]


def simulate_day(fleet: RehearsedFleet, arrivals: Sequence[Arrival], first: int, scale: Scale) -> DayFigures:
    """Simulate a day that begins with a fleet of `first` workers, and return the results.

    At the start of each minute, `scale` gets the time in seconds and the traffic of the minutes so far. `scale` returns the
    wanted number of workers, or None for no change.
    """
    minutes = by_minute(arrivals)
    model = FleetModel(fleet.profile, fleet.objectives, first, fleet.policy.start_s)
    seen: list[Minute] = []
    for one in arrivals:
        while one.at >= len(seen) * BIN_S:
            now = len(seen) * BIN_S
            wanted = scale(now, seen)
            if wanted is not None and wanted != model.workers:
                model.scale(wanted, now)
            if seen:  # late answers are known once the minute is over
                last = seen[-1]
                seen[-1] = Minute(last.traffic, model.late_until(now), last.workers)
            seen.append(Minute(minutes[len(seen)], 0.0, model.serving))
        model.come(one.at, one.prompt, one.answer)
    return model.end(max(len(minutes) * BIN_S, arrivals[-1].at if arrivals else 0.0))


def with_planner(
    fleet: RehearsedFleet, arrivals: Sequence[Arrival], first: int
) -> tuple[DayFigures, list[Change]]:
    """Return the results of a day that begins with `first` workers, and the changes that the planner made."""
    changes: list[Change] = []
    there = first

    def scale(seconds: float, minutes: Sequence[Minute]) -> int | None:
        nonlocal there
        now = EPOCH + timedelta(seconds=seconds)
        view = ModelView(
            model="m",
            provisioned=there,
            profile=fleet.profile,
            objectives=fleet.objectives,
            minutes=list(minutes),
            changes=changes,
        )
        (proposal,) = plan(fleet.policy, [view], now, 0.0)
        if proposal.after != there:
            changes.append(Change(now, there, proposal.after))
            there = proposal.after
        return there

    return simulate_day(fleet, arrivals, first, scale), changes


def with_fixed(fleet: RehearsedFleet, arrivals: Sequence[Arrival], workers: int) -> DayFigures:
    """Return the results of a day with a fixed number of workers."""
    return simulate_day(fleet, arrivals, workers, lambda seconds, minutes: None)


def with_perfect_knowledge(fleet: RehearsedFleet, arrivals: Sequence[Arrival]) -> DayFigures:
    """Return the results of a day with the smallest sufficient fleet, given the traffic in advance.

    Every five minutes, the number of workers is computed from the traffic to come, and raised or lowered by a margin. A margin
    suffices if the share of late requests is at most the policy's limit. The results are those of the smallest margin in MARGINS
    that suffices, or of the largest margin if none does.
    """
    minutes = by_minute(arrivals)
    each = [needed(minute, fleet.profile, fleet.objectives) for minute in minutes]
    steps = [max(each[n : n + STEP_BINS]) for n in range(0, len(each), STEP_BINS)]
    low, high = 0, len(MARGINS) - 1
    best: DayFigures | None = None
    while low <= high:
        middle = (low + high) // 2
        figures = _known_before(fleet, arrivals, steps, MARGINS[middle])
        if figures.missed_share <= fleet.policy.missed:
            best, high = figures, middle - 1
        else:
            low = middle + 1
    return best if best is not None else _known_before(fleet, arrivals, steps, MARGINS[-1])


def _known_before(
    fleet: RehearsedFleet, arrivals: Sequence[Arrival], steps: Sequence[int], margin: float
) -> DayFigures:
    planned = [max(fleet.policy.workers_min, ceil(step * (1 + margin))) for step in steps]

    def scale(seconds: float, minutes: Sequence[Minute]) -> int:
        now, soon = seconds / BIN_S / STEP_BINS, (seconds + fleet.policy.start_s) / BIN_S / STEP_BINS
        last = len(planned) - 1
        return max(planned[min(int(now), last)], planned[min(int(soon), last)])

    return simulate_day(fleet, arrivals, planned[0], scale)
