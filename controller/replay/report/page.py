"""A report as one file: a page that needs no network, or Markdown."""

import base64
import gzip
import json
import re
from datetime import datetime
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from controller.replay.report.figure import COLORS, figure
from controller.replay.sentences import span
from events.errors import HoldfastError

PLOTLY = "plotly"
ROWS_MAX = 1000  # of a table in the page; what comes beyond is in its data


class NoPlotly(HoldfastError):
    """The page's picture is drawn by plotly, which is not installed: pip install -e '.[report]'. -o md and -o json need none."""


def html(report: dict[str, Any], lanes: dict[str, Any]) -> str:
    """Return a report as a page. Raise NoPlotly."""
    data = {
        "figure": figure(lanes),
        "frames": report["frames"],
        "first": report["first_frame"],
        "events": report["events"],
        "lanes": lanes["workers"],
        "colors": COLORS,
    }
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 6, mtime=0)
    return (
        _environment(escape=True)
        .get_template("report.html.jinja")
        .render(
            report=report,
            lanes=lanes,
            rows_max=ROWS_MAX,
            style=_asset("report.css"),
            script=_asset("report.js"),
            plotly=_plotly(),
            data=base64.b64encode(packed).decode(),
        )
    )


def markdown(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    return _environment(escape=False).get_template("report.md.jinja").render(report=report, rows_max=ROWS_MAX)


def _environment(*, escape: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"span": _span, "clock": _clock, "cell": _cell, "line": _line}
    return environment


def _span(seconds: float | None) -> str:
    return "–" if seconds is None else span(seconds)


def _clock(at: str) -> str:
    """Return an instant's time of day, to the millisecond."""
    return f"{datetime.fromisoformat(at):%H:%M:%S.%f}"[:-3]


def _cell(text: str) -> str:
    """Return a text that a cell of a Markdown table holds."""
    return _line(text).replace("|", "\\|")


def _line(text: str) -> str:
    """Return a text that stays on a line of Markdown, and says there what it says here."""
    return re.sub(r"([\\`*\[\]#])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        return (files(PLOTLY) / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError:
        raise NoPlotly(NoPlotly.__doc__) from None
