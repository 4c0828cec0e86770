"""A sweep as a page that needs no network."""

from typing import Any

from controller.replay.pages import asset, environment, plotly

STYLE = ("controller.replay.report", "report.css")  # all pages of history look alike


def html(document: dict[str, Any], picture: dict[str, Any], asked: list[str]) -> str:
    """Return what the values of a setting come to as a page. Raise NoPlotly."""
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
