"""Grafana-managed rules ask what Prometheus' rules ask, with nothing recorded, and say the same."""

import json
from typing import Any

import pytest
from asked_metrics import KNOWN, base, selectors

from grafana.managed_rules import SOURCE, document, text
from grafana.rules import ALERTS
from grafana.write import MANAGED

RULES = {rule["title"]: rule for rule in document()["groups"][0]["rules"]}
SOURCES = MANAGED.parents[1] / "datasources" / "holdfast.yaml"


def test_they_are_what_their_source_says() -> None:
    assert MANAGED.read_text() == text()


def test_each_alert_is_one_of_them() -> None:
    assert [*RULES] == [alert.name for alert in ALERTS]
    assert len({rule["uid"] for rule in RULES.values()}) == len(ALERTS)
    assert all(len(rule["uid"]) <= 40 for rule in RULES.values()), "Grafana takes no longer ones"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_it_fires_for_what_the_expression_leaves(alert: Any) -> None:
    rule = RULES[alert.name]
    asked, left = rule["data"]
    assert rule["condition"] == left["refId"] and left["model"]["expression"] == asked["refId"]
    assert (asked["datasourceUid"], left["datasourceUid"]) == (SOURCE, "__expr__")
    assert left["model"]["conditions"] == [{"evaluator": {"type": "gt", "params": [-1.0]}}]
    assert (rule["for"], rule["labels"]["severity"]) == (alert.lasts, alert.severity)
    names = {base(one.name) for one in selectors(asked["model"]["expr"])}
    assert names and names <= {*KNOWN, "up"}, "nothing that is recorded: nobody records it"
    assert "$value " not in json.dumps(rule["annotations"]) and "$value}" not in json.dumps(
        rule["annotations"]
    )
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{alert.runbook}.md"


def test_the_data_source_is_the_one_that_is_provisioned() -> None:
    assert f"    uid: {SOURCE}\n" in SOURCES.read_text()
