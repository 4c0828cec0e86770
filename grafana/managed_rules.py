"""The same alerts as Grafana-managed rules, for setups without Prometheus rules.

Each rule queries the Prometheus data source with the alert's expression and fires for each series in the result. No series means
no alert, not missing data. Recording rules are inlined, because nothing records them in this setup.
"""

import json
import re

from grafana.model import Json
from grafana.rules import ALERTS, RECORDED, Alert

SOURCE = "holdfast-prometheus"  # of provisioning/datasources
EVERY = "30s"
NO_LESS = -1.0  # below every value of an alert, none of which is negative
_VALUE = re.compile(r"\{\{ \$value(?: \| (\w+))? \}\}")


def text() -> str:
    """Return the document that Grafana's alert provisioning reads."""
    group = {"orgId": 1, "name": "holdfast", "folder": "Holdfast", "interval": EVERY}
    document = {"apiVersion": 1, "groups": [group | {"rules": [_rule(alert) for alert in ALERTS]}]}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _rule(alert: Alert) -> Json:
    asks = {"refId": "A", "expr": _in_full(alert.expr), "instant": True, "range": False}
    threshold = {
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
            {"refId": "B", "datasourceUid": "__expr__", "model": threshold} | window,
        ],
        "for": alert.lasts,
        "noDataState": "OK",
        "execErrState": "Error",
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": _template(alert.summary),
            "description": _template(alert.says),
            "dashboard_url": alert.dashboard_url,
            "runbook_url": alert.runbook_url,
        },
    }


def _in_full(expr: str) -> str:
    for one in RECORDED:
        expr = expr.replace(f"{one.name} ", f"({one.expr}) ")  # the space ends the name: 30m is not 3
    return expr


def _template(words: str) -> str:
    """Return a text as a Grafana template, in which a value is addressed by its query."""
    return _VALUE.sub(lambda found: f"{{{{ {found[1] + ' ' if found[1] else ''}$values.A.Value }}}}", words)
