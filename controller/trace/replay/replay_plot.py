"""Draws a replay: distributions and the course over time, as PNG or SVG."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from controller.trace.plot import COLOR, blank
from controller.trace.replay.measures import DurationHistogram, ReplayMeasures, middle_s

BARS_MAX = 60
WIDE = 10.0  # ratio of the last to the first value; above it, the scale is logarithmic
STEP_S = 0.1  # a shorter step gives no rate


def draw(title: str, measures: ReplayMeasures, path: Path) -> None:
    """Write the chart of a replay. Raise OSError if it cannot be written."""
    made = blank()
    made.suptitle(title)
    ttft, itl, whole, flying, tokens, failed = made.subplots(2, 3).flat
    _distribution(ttft, "First token", measures.ttft)
    _distribution(itl, "Between tokens", measures.itl)
    _distribution(whole, "Whole answer", measures.e2e)
    points = measures.timeline.points
    times = [point.at_s for point in points]
    _line(flying, "In flight", "requests", times, [float(point.in_flight) for point in points])
    steps = [(a, b) for a, b in pairwise(points) if b.at_s - a.at_s > STEP_S]
    ends = [b.at_s for _, b in steps]
    _line(tokens, "Tokens", "a second", ends, [(b.events - a.events) / (b.at_s - a.at_s) for a, b in steps])
    _line(failed, "Failed", "requests so far", times, [float(point.failed) for point in points])
    made.savefig(path, dpi=110)


def _distribution(axes: Any, title: str, values: DurationHistogram) -> None:
    axes.set_title(title)
    axes.set_xlabel("ms")
    axes.set_ylabel("share")
    if not values.count:
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
        return
    used = [place for place, count in enumerate(values.counts) if count]
    group = 1 + (used[-1] - used[0]) // BARS_MAX
    begins = range(used[0], used[-1] + 1, group)
    shares = [sum(values.counts[place : place + group]) / values.count for place in begins]
    edges = [middle_s(place) * 1e3 for place in (*begins, begins[-1] + group)]
    axes.stairs(shares, edges, color=COLOR, fill=True)
    if edges[-1] > WIDE * edges[0]:
        axes.set_xscale("log")


def _line(axes: Any, title: str, unit: str, times: list[float], values: list[float]) -> None:
    axes.set_title(title)
    axes.set_xlabel("seconds")
    axes.set_ylabel(unit)
    axes.plot(times, values, color=COLOR)
    axes.set_ylim(0, max(1.0, 1.05 * max(values, default=0.0)))
