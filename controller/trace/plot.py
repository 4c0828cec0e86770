"""Draws a trace's statistics (lengths, hit rates and arrivals) as a PNG or SVG file.

Drawing needs matplotlib. Holdfast depends on it only through the optional extra `plots`, because matplotlib is larger than all
other dependencies together.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from controller.trace.analysis import Numbers, TraceMeasures
from events.errors import HoldfastError, UsageError

SUFFIXES = (".png", ".svg")
BINS = 60
COLOR = "#33658a"

Axes: TypeAlias = Any  # matplotlib's Axes, which may not be installed


class NoPlots(HoldfastError):
    """Plots need matplotlib, which is not installed. Install it with: pip install -e '.[plots]'."""


def check(path: Path) -> None:
    """Check that a chart can be drawn. Call this before reading the trace, because the reading can take long.

    Raise UsageError if the file name ends neither in .png nor in .svg. Raise NoPlots if matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}")
    blank()


def draw(name: str, measures: TraceMeasures, path: Path) -> None:
    """Write the chart of a trace to `path`. Raise OSError if the file cannot be written."""
    figure = blank()
    figure.suptitle(f"{name}: {len(measures.arrivals_s):,} requests")
    panels = figure.subplots(2, 3).flat
    for axes, title, values in zip(
        panels,
        ("Input length", "Context length", "Unique prompt length", "Output length"),
        (measures.input_length, measures.context_length, measures.unique_length, measures.output_length),
        strict=False,
    ):
        _lengths(axes, title, values)
    hit_rate, arrivals = list(figure.axes)[4:]
    _histogram(
        hit_rate, "Theoretical hit rate", "of a prompt's blocks", measures.hit_rate, np.linspace(0, 1, 41)
    )
    _arrivals(arrivals, measures.arrivals_s)
    figure.savefig(path, dpi=110)


def blank() -> Any:
    """Return an empty matplotlib figure. Raise NoPlots if matplotlib is not installed."""
    try:
        # not pyplot, which needs a display and keeps state
        figure = import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise NoPlots from error
    return figure(figsize=(13, 7.5), layout="constrained")


def _lengths(axes: Axes, title: str, values: Numbers) -> None:
    positive = values[values > 0]
    high = float(positive.max()) if len(positive) else 1.0
    bins = np.geomspace(1, max(high, 2.0), BINS)
    zeros = len(values) - len(positive)
    _histogram(axes, title + (f" ({zeros:,} are 0)" if zeros else ""), "tokens", positive, bins)
    axes.set_xscale("log")


def _histogram(axes: Axes, title: str, unit: str, values: Numbers, bins: Numbers) -> None:
    axes.set_title(title)
    axes.set_xlabel(unit)
    axes.set_ylabel("requests")
    if len(values):
        axes.hist(values, bins=bins, color=COLOR)
    else:
        axes.text(0.5, 0.5, "not known", ha="center", va="center", transform=axes.transAxes)


def _arrivals(axes: Axes, times_s: Numbers) -> None:
    span = max(float(times_s[-1] - times_s[0]), 1e-9)
    counts, edges = np.histogram(times_s, bins=BINS)
    axes.set_title("Arrivals")
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests a second")
    axes.stairs(counts / (span / BINS), edges, color=COLOR, fill=True)
