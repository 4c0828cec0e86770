"""Renders a report as a self-contained HTML page or as Markdown."""

import base64
import gzip
import json
from typing import Any

from controller.replay.pages import asset, plotly, render
from controller.replay.report.figure import COLORS, figure

Document = dict[str, Any]  # a report or its lanes, as plain JSON types

ROWS_MAX = 1000  # maximum number of rows shown per table; further rows are only in the page's data


def html(report: Document, lanes: Document) -> str:
    """Return a report and its swim-lane chart as one self-contained HTML page.

    Raise NoPlotly if Plotly is not installed."""
    data = {
        "figure": figure(lanes),
        "frames": report["frames"],
        "first": report["first_frame"],
        "events": report["events"],
        "lanes": lanes["workers"],
        "colors": COLORS,
    }
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 6, mtime=0)
    return render(
        __package__,
        "report.html.jinja",
        report=report,
        lanes=lanes,
        rows_max=ROWS_MAX,
        style=asset(__package__, "report.css"),
        script=asset(__package__, "report.js"),
        plotly=plotly(),
        data=base64.b64encode(packed).decode(),
    )


def markdown(report: Document) -> str:
    """Return a report as Markdown, without the chart."""
    return render(__package__, "report.md.jinja", report=report, rows_max=ROWS_MAX)
