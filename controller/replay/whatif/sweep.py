"""Runs a sweep: answers the same what-if question for many values of one setting."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log
from typing import Any

from controller.replay.whatif.comparison import PLACES, Estimate, estimate, finite, limits, totals
from controller.replay.whatif.course import CourseTerms, take_all
from controller.replay.whatif.faults import FaultSeen, fared, faults
from controller.replay.whatif.question import PolicyChange, checked, parse_changes, value_of
from controller.replay.whatif.recording import Recording
from events.errors import UsageError

POINTS_MAX = 60
SHOWN = ("fenced after, s", "recovered after, s", "answers exposed", "capacity missing", "canaries asked")
_RANGE = re.compile(r"([^=]+)=(.+?)\.\.(.+)")


@dataclass(frozen=True, slots=True)
class Swept:
    """The setting that a sweep varies, and its values in ascending order."""

    name: str
    values: list[float]
    asked: PolicyChange  # other settings, which are changed for every value


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The results of a sweep for one value of the varied setting."""

    value: float
    figures: dict[str, Estimate]  # figures over the whole recording, by name


def swept(text: str, points: int, besides: PolicyChange) -> Swept:
    """Parse `--sweep NAME=A..B` into `points` values from A to B, with a constant ratio between successive values.

    `besides` holds the other changed settings. If A and B are whole numbers, the values are rounded to whole numbers, and
    duplicates are removed. Raise UsageError if an argument is invalid."""
    parts = _RANGE.fullmatch(text)
    if parts is None:
        raise UsageError(f"--sweep {text}: must be NAME=A..B, such as --sweep canary.interval=1s..60s")
    if not 2 <= points <= POINTS_MAX:
        raise UsageError(f"--points {points}: must be from 2 to {POINTS_MAX}")
    low, high = value_of(parts[2]), value_of(parts[3])
    if not (isinstance(low, int | float) and isinstance(high, int | float) and 0 < low < high):
        raise UsageError(f"--sweep {text}: must go from a number or duration above 0 to a larger one")
    (name,) = parse_changes([f"{parts[1]}={parts[2]}"], None).values
    whole = isinstance(low, int) and isinstance(high, int)
    steps = [exp(log(low) + (log(high) - log(low)) * n / (points - 1)) for n in range(points)]
    values = sorted({round(one) for one in steps} if whole else {float(f"{one:.4g}") for one in steps})
    checked(besides.also(name, values[0]))
    checked(besides.also(name, values[-1]))
    return Swept(name, list(values), besides)


def sweep(recording: Recording, asked_for: Swept) -> tuple[list[SweepPoint], list[str]]:
    """Simulate each value of a sweep. Return the results, and sentences about what the results do not account for.

    Raise HelperGone if a helper process is killed."""
    found = faults(recording)
    each = [asked_for.asked.also(asked_for.name, value) for value in asked_for.values]
    again, *all_ = take_all(
        recording, [CourseTerms(), *(one.terms(place) for one in each for place in PLACES)]
    )
    points: list[SweepPoint] = []
    notes: list[str] = []
    for n, (value, asked_here) in enumerate(zip(asked_for.values, each, strict=True)):
        courses = all_[n * len(PLACES) : (n + 1) * len(PLACES)]
        figures = {one.name: one.would for one in totals(recording, asked_here, found, again, courses)}
        for name in ("fenced", "recovered"):
            figures[f"{name} after, s"] = estimate(
                [_mean(found, recording, one.weights, name) for one in courses]
            )
        points.append(SweepPoint(value, figures))
        notes = notes or limits(recording, asked_here, found, courses)
    return points, notes


def _mean(found: list[FaultSeen], recording: Recording, weights: Any, name: str) -> float:
    """Return the mean seconds from the estimated beginning of a fault until it is fenced or recovered.

    `name` is "fenced" or "recovered". `weights` are the workers' weights in one simulated history. Only faults that were
    fenced in the recording count; without such a fault, the result is 0. If the simulated history never fences or recovers a
    fault, the fault's time ends at the worker's next fault or at the end of the recording.
    """
    times = []
    for fault in found:
        if fared(fault, recording.weights).fenced is None:
            continue
        at = getattr(fared(fault, weights), name)
        times.append((at if at is not None else fault.until) - fault.likely)
    return sum(times) / len(times) if times else 0.0


def as_json(asked_for: Swept, points: list[SweepPoint]) -> dict[str, Any]:
    """Return the sweep as plain JSON types."""
    return {
        "setting": asked_for.name,
        "besides": dict(asked_for.asked.values),
        "points": [
            {"value": one.value, **{name: finite(figure) for name, figure in one.figures.items()}} for one in points
        ],
    }  # fmt: skip


def lines(asked_for: Swept, points: list[SweepPoint]) -> Iterator[str]:
    """Yield the likely estimates of a sweep as the lines of a table, at most 80 characters wide."""
    yield f"  {asked_for.name:>20}{'fenced':>11}{'recovered':>11}{'exposed':>9}{'GPU s':>11}{'canaries':>11}"
    yield f"  {'':>20}{'s':>11}{'s':>11}{'answers':>9}{'missing':>11}{'asked':>11}"
    for one in points:
        fenced, recovered, exposed, missing, canaries = (one.figures[name].likely for name in SHOWN)
        yield f"  {one.value:>20g}{fenced:>11.1f}{recovered:>11.1f}{exposed:>9,.0f}{missing:>11,.0f}{canaries:>11,.0f}"
