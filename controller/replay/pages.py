"""Provides what all report pages share: template environment, filters, assets and the Plotly script."""

import re
from datetime import datetime
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from controller.replay.sentences import span
from controller.terminal_text import escape_controls
from events.errors import HoldfastError

_markup = re.compile(r"([\\`*\[\]#|~!$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
# Markdown renders these as a link even without markup
_link = re.compile(r"(?i)\b(https?|ftp|mailto|xmpp)(?=:)|\bwww(?=\.)")
_line_start = re.compile(r"^(\s*(?:\d{1,9}(?=[.)])|(?=[-+=>])))")


def escaped(text: str) -> str:
    """Escape a text so that Markdown renders it literally, also in a table cell. Line breaks become spaces."""
    line = _markup.sub(r"\\\1", escape_controls(" ".join(text.split())))
    line = _link.sub(lambda found: f"{found[0]}\\", line.replace("&", "&amp;").replace("<", "&lt;"))
    return _line_start.sub(r"\1\\", line)


PLOTLY = "plotly"


class NoPlotly(HoldfastError):
    """The page's charts need Plotly, which is not installed: pip install -e '.[report]'. -o md and -o json work without it."""


def render(package: str, name: str, **values: Any) -> str:
    """Render the template `name` of a package with these values.

    In an HTML template, the values are escaped as HTML."""
    found = Environment(
        loader=PackageLoader(package, ""),
        autoescape=".html" in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "span": _span,
        "clock": _clock,
        "cell": escaped,
        "line": escaped,
        "figure": _figure,
        "seconds": _seconds,
    }
    return found.get_template(name).render(**values)


def _span(seconds: float | None) -> str:
    return "–" if seconds is None else span(seconds)


def _figure(estimate: dict[str, float | None]) -> str:
    low, likely, high = map(_seconds, estimate.values())
    return likely if low == high else f"{likely} ({low} to {high})"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{max(0.0, value):,.3g}"


def _clock(at: str) -> str:
    """Return the time of day of an ISO 8601 time, with milliseconds."""
    return f"{datetime.fromisoformat(at):%H:%M:%S.%f}"[:-3]


def asset(package: str, name: str) -> str:
    """Return the text of a file in a package."""
    return (files(package) / name).read_text(encoding="utf-8")


def plotly() -> str:
    """Return the JavaScript code of Plotly from the Python package `plotly`. Raise NoPlotly without that package."""
    try:
        return (files(PLOTLY) / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError:
        raise NoPlotly(NoPlotly.__doc__) from None
