"""Model of dashboards, panels and queries, and the JSON that Grafana 11 reads.

A dashboard is rows of panels from left to right; their positions are computed here. A panel queries one of two data sources,
both chosen by the viewer: `$datasource` is the Prometheus, `$history` the Postgres.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Json: TypeAlias = dict[str, object]
Kind: TypeAlias = Literal["stat", "timeseries", "table", "state-timeline", "heatmap"]

SCHEMA = 39  # dashboard schema version of Grafana 11
COLUMNS = 24
TAG = "holdfast"
PROMETHEUS: Json = {"type": "prometheus", "uid": "${datasource}"}
POSTGRES: Json = {"type": "grafana-postgresql-datasource", "uid": "${history}"}
GREEN, YELLOW, ORANGE, RED, GREY = "green", "yellow", "orange", "red", "#8e8e8e"


@dataclass(frozen=True, slots=True)
class Query:
    """One target of a panel. `legend` names its series by their labels."""

    ask: str  # PromQL or SQL
    legend: str = ""
    source: Literal["prometheus", "postgres"] = "prometheus"
    instant: bool = False
    heatmap: bool = False  # its series are the buckets of a histogram
    series: bool = False  # for SQL with the columns time, metric (the series' name) and value

    def json(self, ref: str) -> Json:
        """Return the target as JSON."""
        if self.source == "postgres":
            return {
                "refId": ref, "datasource": POSTGRES, "format": "time_series" if self.series else "table", "rawQuery": True,
                "rawSql": self.ask,
                "editorMode": "code",
            }  # fmt: skip
        return {
            "refId": ref, "datasource": PROMETHEUS, "expr": self.ask, "legendFormat": self.legend or "__auto",
            "editorMode": "code", "instant": self.instant, "range": not self.instant,
            "format": "heatmap" if self.heatmap else "table" if self.instant and not self.legend else "time_series",
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `steps` lists thresholds: the color from each value on, starting with the base color."""

    title: str
    says: str  # description
    asks: Sequence[Query]
    kind: Kind = "timeseries"
    unit: str = "short"
    width: int = 8  # of 24 columns
    height: int = 7
    steps: Sequence[tuple[float | None, str]] = ((None, GREEN),)
    stacked: bool = False
    least: float | None = 0.0
    most: float | None = None
    mappings: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # value -> text and colour
    overrides: Sequence[Json] = ()

    def json(self, number: int, x: int, y: int) -> Json:
        """Return the panel as JSON at its position."""
        sources = {query.source for query in self.asks}
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.says,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "datasource": POSTGRES if sources == {"postgres"} else PROMETHEUS,
            "targets": [query.json(chr(ord("A") + n)) for n, query in enumerate(self.asks)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": list(self.overrides)},
            "options": _options(self.kind),
        }

    def _defaults(self) -> Json:
        found: Json = {
            "unit": self.unit,
            "color": {"mode": "palette-classic" if self.kind == "timeseries" else "thresholds"},
            "thresholds": {
                "mode": "absolute",
                "steps": [{"color": color, "value": value} for value, color in self.steps],
            },
            "mappings": _mappings(self.mappings),
            "custom": _custom(self.kind, stacked=self.stacked),
        }
        bounds = {"min": self.least, "max": self.most}
        return found | {name: value for name, value in bounds.items() if value is not None}


def _mappings(values: Mapping[str, tuple[str, str]]) -> list[Json]:
    if not values:
        return []
    options = {
        value: {"index": n, "text": text, "color": color}
        for n, (value, (text, color)) in enumerate(values.items())
    }
    return [{"type": "value", "options": options}]


def _custom(kind: Kind, *, stacked: bool) -> Json:
    if kind == "timeseries":
        return {
            "drawStyle": "line", "lineWidth": 1, "fillOpacity": 20 if stacked else 5, "showPoints": "never",
            "spanNulls": False, "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        }  # fmt: skip
    return {"fillOpacity": 80, "lineWidth": 0} if kind == "state-timeline" else {}


def _options(kind: Kind) -> Json:
    reduce: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    legend: Json = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    match kind:
        case "stat":
            return {
                "reduceOptions": reduce, "colorMode": "background", "graphMode": "none", "textMode": "auto",
                "justifyMode": "auto", "orientation": "auto", "percentChangeColorMode": "standard", "showPercentChange": False,
                "wideLayout": True,
            }  # fmt: skip
        case "timeseries":
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        case "state-timeline":
            return {
                "mergeValues": True, "showValue": "never", "alignValue": "left", "rowHeight": 0.8, "legend": legend,
                "tooltip": {"mode": "single", "sort": "none"},
            }  # fmt: skip
        case "heatmap":
            return {
                "calculate": False, "yAxis": {"unit": "s"}, "showValue": "never", "legend": {"show": True},
                "color": {
                    "scheme": "Oranges", "mode": "scheme", "exponent": 0.5, "fill": "dark-orange", "reverse": False, "steps": 64,
                },
                "exemplars": {"color": ORANGE}, "tooltip": {"mode": "single"},
            }  # fmt: skip
        case _:
            return {"showHeader": True, "cellHeight": "sm", "frameIndex": 0}


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels, from left to right."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable of a dashboard: a label's values, a query of the state store, or a list of values."""

    name: str
    asks: str = ""  # label_values(metric, label), or SQL
    source: Literal["prometheus", "postgres"] = "prometheus"
    values: Sequence[str] = ()  # instead of a query; the first is the default
    many: bool = True  # multiple choice, all by default

    def json(self) -> Json:
        """Return the variable as JSON."""
        if self.values:
            first = {"text": self.values[0], "value": self.values[0], "selected": True}
            return {
                "name": self.name, "label": self.name, "type": "custom", "query": ",".join(self.values), "multi": False,
                "includeAll": False, "current": first,
            }  # fmt: skip
        asks: object = {"query": self.asks, "refId": "values"} if self.source == "prometheus" else self.asks
        all: Json = {"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}} if self.many else {}
        return {
            "name": self.name, "label": self.name, "type": "query", "query": asks,
            "datasource": PROMETHEUS if self.source == "prometheus" else POSTGRES,
            "refresh": 2, "sort": 1 if self.source == "prometheus" else 0, "multi": self.many, "includeAll": self.many,
            **all,
        }  # fmt: skip


MODEL = Variable(name="model", asks="label_values(holdfast_degradation_level, model)")
WORKER = Variable(name="worker", asks="label_values(dynamo_worker_status, worker_id)")
FRONTEND = Variable(name="frontend", asks='label_values(up{role="frontend"}, process)')


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard. Its `uid` is part of its URL and never changes."""

    uid: str
    title: str
    says: str
    rows: Sequence[Row]
    variables: Sequence[Variable] = ()
    events: str = ""  # SQL for annotations: time, text and tags

    def panels(self) -> Iterator[Panel]:
        """Yield all panels."""
        for row in self.rows:
            yield from row.panels

    def json(self) -> Json:
        """Return the dashboard as Grafana's JSON."""
        sources = [
            _source("datasource", "Prometheus", "prometheus"),
            _source("history", "Postgres", "grafana-postgresql-datasource"),
        ]
        return {
            "uid": self.uid,
            "title": f"Holdfast / {self.title}",
            "description": self.says,
            "tags": [TAG],
            "schemaVersion": SCHEMA,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "timezone": "utc",
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "timepicker": {},
            "annotations": {"list": [_marked(self.events)] if self.events else []},
            "templating": {"list": [*sources, *(variable.json() for variable in self.variables)]},
            "links": [
                {
                    "title": "Holdfast", "type": "dashboards", "tags": [TAG], "asDropdown": True, "includeVars": True,
                    "keepTime": True, "targetBlank": False, "icon": "external link", "tooltip": "", "url": "",
                }
            ],
            "panels": list(self._placed()),
        }  # fmt: skip

    def _placed(self) -> Iterator[Json]:
        number = y = 0
        for row in self.rows:
            number += 1
            place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
            yield {
                "id": number,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
            x, y, high = 0, y + 1, 0
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    x, y, high = 0, y + high, 0
                number += 1
                yield panel.json(number, x, y)
                x, high = x + panel.width, max(high, panel.height)
            y += high


def _marked(sql: str) -> Json:
    return {
        "name": "events", "enable": True, "iconColor": ORANGE, "datasource": POSTGRES,
        "target": {"refId": "marks", "format": "table", "rawQuery": True, "rawSql": sql, "editorMode": "code"},
    }  # fmt: skip


def _source(name: str, label: str, kind: str) -> Json:
    return {
        "name": name,
        "label": label,
        "type": "datasource",
        "query": kind,
        "refresh": 1,
        "regex": "",
    }
