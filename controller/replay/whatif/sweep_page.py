"""Renders a sweep as a self-contained HTML page."""

from typing import Any

from controller.replay.pages import asset, plotly, render
from controller.replay.whatif.comparison import Estimate
from controller.replay.whatif.sweep import SweepPoint, Swept

Document = dict[str, Any]  # a sweep or its chart, as plain JSON types

# package and file of the style sheet that all report pages share
STYLE = ("controller.replay.report", "report.css")


def html(document: Document, picture: Document, asked: list[str]) -> str:
    """Return the sweep `document` and its chart `picture` as an HTML page. Raise NoPlotly without Plotly.

    `asked` holds the lines at the top of the page: the recorded period and the other changed settings."""
    return render(
        __package__,
        "sweep.html.jinja",
        sweep=document,
        asked=asked,
        picture=picture,
        style=asset(*STYLE),
        script=asset(__package__, "sweep.js"),
        plotly=plotly(),
    )


PANELS = (
    ("fenced after, s", "s until fenced"),
    ("recovered after, s", "s until recovered"),
    ("answers exposed", "answers exposed"),
    ("capacity missing", "GPU s missing"),
    ("ejections", "ejections"),
    ("canaries asked", "canaries"),
)
COLOR, BAND = "#0072b2", "rgba(0,114,178,0.2)"
COLUMNS = 2


def figure(asked_for: Swept, points: list[SweepPoint]) -> Document:
    """Return the chart of a sweep as Plotly's `data` and `layout`.

    The chart has one panel per measure, such as ejections. A line shows the likely estimate, and a band reaches from the
    lowest to the highest estimate."""
    data: list[Document] = []
    layout: Document = {
        "showlegend": False, "height": 900,
        "grid": {"rows": (len(PANELS) + 1) // COLUMNS, "columns": COLUMNS, "pattern": "independent"},
        "margin": {"t": 20, "b": 60},
    }  # fmt: skip
    for n, (name, text) in enumerate(PANELS, 1):
        number = "" if n == 1 else str(n)
        values = [one.value for one in points]
        data += _panel(values, [one.figures[name] for one in points], number, text)
        layout[f"xaxis{number}"] = {"title": {"text": asked_for.name}, "type": "log"}
        layout[f"yaxis{number}"] = {"title": {"text": text}, "rangemode": "tozero"}
    return {"data": data, "layout": layout}


def _panel(values: list[float], figures: list[Estimate], number: str, text: str) -> list[Document]:
    axes = {"xaxis": f"x{number}", "yaxis": f"y{number}", "type": "scatter"}
    around = {
        "x": [*values, *reversed(values)],
        "y": [*(one.high for one in figures), *(one.low for one in reversed(figures))],
        "fill": "toself", "fillcolor": BAND, "line": {"width": 0}, "hoverinfo": "skip", **axes,
    }  # fmt: skip
    likely = {
        "x": values, "y": [one.likely for one in figures], "mode": "lines+markers", "line": {"color": COLOR}, "name": text,
        **axes,
    }  # fmt: skip
    return [around, likely]
