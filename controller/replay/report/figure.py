"""Builds the swim-lane chart of a report as Plotly traces and layout, in plain JSON types."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

COLORS = {  # the Okabe-Ito palette, which is safe for color-blind readers
    "HEALTHY": "#009e73",
    "RAMPING": "#94d3bd",
    "CAPPED": "#56b4e9",
    "SPARE": "#b0b0b0",
    "SUSPICIOUS": "#f0e442",
    "UNHEALTHY": "#d55e00",
    "DRAINING": "#cc79a7",
    "DEAD": "#404040",
}
BREAKERS = {"open": "#d55e00", "half_open": "#e69f00"}
CANARIES = {
    "passed": ("circle", "#009e73", 4),
    "slow": ("diamond", "#e69f00", 8),
    "failed": ("x", "#d55e00", 9),
}
CONTROL = "control plane"
BLUE = "#0072b2"
TEXT = "%{text}<extra></extra>"  # Plotly template: a mark shows its text when the mouse is over it
Lanes = dict[str, Any]  # the data of `lanes.lanes`
Trace = dict[str, Any]
LANE_PX, LANES_LEAST_PX, CAPACITY_PX = 26, 120, 90


def utc(millis: float) -> str:
    """Format milliseconds since 1970 as a time in UTC.

    The time is passed to Plotly as text, because Plotly converts numbers to the viewer's time zone but shows text unchanged."""
    return datetime.fromtimestamp(millis / 1e3, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")


def figure(lanes: Lanes) -> dict[str, Any]:
    """Return the `data` and `layout` of a report's swim-lane chart for `Plotly.newPlot`. All times are in UTC."""
    names = [*reversed(lanes["workers"]), CONTROL]
    height = max(LANES_LEAST_PX, LANE_PX * len(names)) + CAPACITY_PX + 110
    upper = 1 - (CAPACITY_PX + 40) / (height - 110)
    data = [
        *_bars(lanes["states"], COLORS, 0.75), *_bars(lanes["breakers"], BREAKERS, 0.2, "breaker "), *_canaries(lanes),
        *_moves(lanes), _control(lanes), _capacity(lanes),
    ]  # fmt: skip
    axis = {"showgrid": True, "zeroline": False, "automargin": True}
    layout = {
        "height": height, "barmode": "overlay", "bargap": 0.25, "hovermode": "closest", "dragmode": "zoom",
        "margin": {"l": 90, "r": 20, "t": 20, "b": 50}, "legend": {"orientation": "h", "y": -0.12},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": axis | {"type": "date", "range": [utc(lanes["start"]), utc(lanes["end"])], "anchor": "y2"},
        "yaxis": axis
        | {"type": "category", "categoryorder": "array", "categoryarray": names, "fixedrange": True,
           "domain": [1 - upper, 1], "range": [-0.6, len(names) - 0.4]},
        "yaxis2": axis
        | {"fixedrange": True, "domain": [0, 1 - upper - 40 / (height - 110)], "range": [-0.05, 1.05],
           "tickformat": ".0%", "nticks": 3},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _bars(spans: list[list[Any]], colors: dict[str, str], width: float, before: str = "") -> Iterator[Trace]:
    """Yield one Plotly trace per value in `colors`, such as a worker state or a breaker state.

    A trace has one bar for each of the `spans` of time in which a worker had that value. The trace's name is the value, with
    the prefix `before`."""
    for value, color in colors.items():
        matching = [one for one in spans if one[1] == value]
        name = f"{before}{value.replace('_', ' ') if before else value}"
        if matching:
            yield {
                "type": "bar", "orientation": "h", "name": name, "y": [one[0] for one in matching],
                "base": [utc(one[2]) for one in matching], "x": [one[3] - one[2] for one in matching], "width": width,
                "marker": {"color": color, "line": {"width": 0}},
                "customdata": [(one[3] - one[2]) / 1000 for one in matching],
                "hovertemplate": f"%{{y}}: {name} for %{{customdata:.3g}} s<extra></extra>",
            }  # fmt: skip


def _canaries(lanes: Lanes) -> Iterator[Trace]:
    for outcome, (symbol, color, size) in CANARIES.items():
        matching = [one for one in lanes["canaries"] if one[1] == outcome]
        if matching:
            yield {
                "type": "scatter", "mode": "markers", "name": f"canary {outcome}", "x": [utc(one[2]) for one in matching],
                "y": [one[0] for one in matching], "text": [one[3] for one in matching],
                "marker": {"symbol": symbol, "color": color, "size": size, "line": {"width": 1, "color": "#ffffff"}},
                "hovertemplate": TEXT,
            }  # fmt: skip


def _moves(lanes: Lanes) -> list[Trace]:
    if not lanes["moves"]:
        return []
    x: list[str | None] = []
    y: list[str | None] = []
    text: list[str | None] = []
    for at, source, target, count in lanes["moves"]:
        label = f"{count} stream{'' if count == 1 else 's'} from {source} to {target}"
        x += [utc(at), utc(at), None]
        y += [source, target, None]
        text += [label, label, None]
    return [{
        "type": "scatter", "mode": "lines+markers", "name": "streams moved", "x": x, "y": y, "text": text,
        "line": {"width": 1.5, "color": BLUE},
        "marker": {"symbol": "arrow", "angleref": "previous", "size": 9, "color": BLUE}, "hovertemplate": TEXT,
    }]  # fmt: skip


def _control(lanes: Lanes) -> Trace:
    events = lanes["control"]
    return {
        "type": "scatter", "mode": "markers", "name": CONTROL, "x": [utc(at) for at, _ in events],
        "y": [CONTROL for _ in events], "text": [text for _, text in events],
        "marker": {"symbol": "square", "size": 7, "color": BLUE}, "hovertemplate": TEXT, "showlegend": False,
    }  # fmt: skip


def _capacity(lanes: Lanes) -> Trace:
    steps = lanes["capacity"]
    return {
        "type": "scatter", "mode": "lines", "name": "share of the fleet that serves",
        "x": [utc(one[0]) for one in steps] + [utc(lanes["end"])], "y": [one[1] for one in steps] + [steps[-1][1]],
        "yaxis": "y2", "line": {"shape": "hv", "color": BLUE, "width": 2}, "fill": "tozeroy",
        "fillcolor": "rgba(0,114,178,0.2)", "hovertemplate": "%{y:.0%} serves<extra></extra>",
    }  # fmt: skip
