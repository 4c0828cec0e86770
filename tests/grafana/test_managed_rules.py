"""Grafana-managed rules equal the Prometheus rules, with recording rules inlined."""

import json
from typing import Any

import pytest
from asked_metrics import KNOWN, base, selectors

from grafana.managed_rules import SOURCE, text
from grafana.rules import ALERTS
from grafana.write import MANAGED

RULES = {rule["title"]: rule for rule in json.loads(text())["groups"][0]["rules"]}
SOURCES = MANAGED.parents[1] / "datasources" / "holdfast.yaml"


def test_the_managed_rules_file_matches_its_source() -> None:
    assert MANAGED.read_text() == text()


def test_each_alert_has_a_managed_rule() -> None:
    assert [*RULES] == [alert.name for alert in ALERTS]
    assert len({rule["uid"] for rule in RULES.values()}) == len(ALERTS)
    assert all(len(rule["uid"]) <= 40 for rule in RULES.values()), "Grafana accepts no longer uids"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_a_rule_fires_for_each_series_of_its_expression(alert: Any) -> None:
    rule = RULES[alert.name]
    query, threshold = rule["data"]
    assert rule["condition"] == threshold["refId"] and threshold["model"]["expression"] == query["refId"]
    assert (query["datasourceUid"], threshold["datasourceUid"]) == (SOURCE, "__expr__")
    assert threshold["model"]["conditions"] == [{"evaluator": {"type": "gt", "params": [-1.0]}}]
    assert (rule["for"], rule["labels"]["severity"]) == (alert.lasts, alert.severity)
    names = {base(one.name) for one in selectors(query["model"]["expr"])}
    assert names and names <= {*KNOWN, "up"}, "no recording rules, which do not exist in this setup"
    assert "$value " not in json.dumps(rule["annotations"]) and "$value}" not in json.dumps(
        rule["annotations"]
    )
    assert rule["annotations"]["runbook_url"] == f"docs/operations/runbooks/{alert.runbook}.md"


def test_the_data_source_is_the_provisioned_one() -> None:
    assert f"    uid: {SOURCE}\n" in SOURCES.read_text()
