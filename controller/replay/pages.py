"""What pages of history have in common: templates, styles, and the script that draws their pictures."""

from datetime import datetime
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined

from controller.replay.markdown_text import escaped
from controller.replay.sentences import span
from events.errors import HoldfastError

PLOTLY = "plotly"


class NoPlotly(HoldfastError):
    """The page's picture is drawn by plotly, which is not installed: pip install -e '.[report]'. -o md and -o json need none."""


def environment(package: str, *, escape: bool) -> Environment:
    """Return what fills in the templates of a package; `escape`: as HTML."""
    found = Environment(
        loader=PackageLoader(package, ""),
        autoescape=escape,
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
    return found


def _span(seconds: float | None) -> str:
    return "–" if seconds is None else span(seconds)


def _figure(estimate: dict[str, float | None]) -> str:
    low, likely, high = map(_seconds, estimate.values())
    return likely if low == high else f"{likely} ({low} to {high})"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{max(0.0, value):,.3g}"


def _clock(at: str) -> str:
    """Return an instant's time of day, to the millisecond."""
    return f"{datetime.fromisoformat(at):%H:%M:%S.%f}"[:-3]


def asset(package: str, name: str) -> str:
    """Return a file of a package."""
    return (files(package) / name).read_text(encoding="utf-8")


def plotly() -> str:
    """Return Plotly's script. Raise NoPlotly."""
    try:
        return (files(PLOTLY) / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError:
        raise NoPlotly(NoPlotly.__doc__) from None
