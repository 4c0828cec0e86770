"""Renders a sweep as a self-contained HTML page."""

from typing import Any

from controller.replay.pages import asset, environment, plotly

STYLE = ("controller.replay.report", "report.css")  # shared by all report pages


def html(document: dict[str, Any], picture: dict[str, Any], asked: list[str]) -> str:
    """Return the sweep as an HTML page. Raise NoPlotly."""
    return (
        environment(__package__, escape=True)
        .get_template("sweep.html.jinja")
        .render(
            sweep=document,
            asked=asked,
            picture=picture,
            style=asset(*STYLE),
            script=asset(__package__, "sweep.js"),
            plotly=plotly(),
        )
    )
