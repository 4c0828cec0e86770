"""The same alerts as Grafana-managed rules, for where Grafana itself is to look, and no Prometheus rules are loaded.

Each asks the Prometheus data source for what the alert's expression leaves, and fires for each series that is left: none is where
all is well, which is no missing data. Recorded figures are put in their own words, because nobody records them then.
"""

import json
import re
from typing import Any

from grafana.rules import ALERTS, RECORDED, Alert

SOURCE = "holdfast-prometheus"  # of provisioning/datasources
EVERY = "30s"
NO_LESS = -1.0  # whatever is left is more: no alert's figure is negative
_VALUE = re.compile(r"\{\{ \$value(?: \| (\w+))? \}\}")


def document() -> dict[str, Any]:
    """Return what Grafana's provisioning of alerts reads."""
    group = {"orgId": 1, "name": "holdfast", "folder": "Holdfast", "interval": EVERY}
    return {"apiVersion": 1, "groups": [group | {"rules": [_rule(alert) for alert in ALERTS]}]}


def text() -> str:
    """Return its file."""
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def _rule(alert: Alert) -> dict[str, Any]:
    asks = {"refId": "A", "expr": _in_full(alert.expr), "instant": True, "range": False}
    left = {
        "refId": "B", "type": "threshold", "expression": "A",
        "conditions": [{"evaluator": {"type": "gt", "params": [NO_LESS]}}],
    }  # fmt: skip
    window = {"relativeTimeRange": {"from": 600, "to": 0}}
    return {
        "uid": alert.name,
        "title": alert.name,
        "condition": "B",
        "data": [
            {"refId": "A", "datasourceUid": SOURCE, "model": asks} | window,
            {"refId": "B", "datasourceUid": "__expr__", "model": left} | window,
        ],
        "for": alert.lasts,
        "noDataState": "OK",
        "execErrState": "Error",
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": _said(alert.summary),
            "description": _said(alert.says),
            "dashboard_url": alert.dashboard_url,
            "runbook_url": alert.runbook_url,
        },
    }


def _in_full(expr: str) -> str:
    for one in RECORDED:
        expr = expr.replace(f"{one.name} ", f"({one.expr}) ")  # the blank ends it: 30m is no 3
    return expr


def _said(words: str) -> str:
    """Return a sentence as Grafana's templates have it: there a value is named by its query."""
    return _VALUE.sub(lambda found: f"{{{{ {found[1] + ' ' if found[1] else ''}$values.A.Value }}}}", words)
