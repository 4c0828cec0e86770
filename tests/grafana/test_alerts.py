"""Each alert fires when it should and only then, by Prometheus' own unit tests of rules."""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from asked_metrics import KNOWN, OF_TARGETS, base, selectors
from prometheus_server import binary

from grafana.rules import ALERTS, DAY_S, FIRST_TOKEN_LE, RECORDED, text
from grafana.write import BOARDS, RULES

EVERY_S = 15
AT = "40m"  # evaluation time
RECORDED_NAMES = {one.name for one in RECORDED}
MODEL, WORKER = {"model": "m"}, {"worker_id": "w1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two histories for an alert in Prometheus' notation, one sample each 15 s: one fires, one does not."""

    fires: Mapping[str, str]  # values by series
    calm: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)


def grows(series: str, rate: float) -> dict[str, str]:
    """Return a counter that grows by `rate` with each scrape, one of which is missing."""
    return {series: f"0+{rate:g}x100 _ {rate * 102:g}+{rate:g}x100"}


def stays(series: str, value: float, calm: float = 0) -> dict[str, str]:
    """Return a gauge that is calm for 20 minutes and then has another value."""
    return {series: f"{calm:g}x80 {value:g}x20 _ {value:g}x100"}


REQUESTS = "dynamo_frontend_requests_total"
ASKED = REQUESTS + '{model="m",status="success",error_type=""}'
FAILED = REQUESTS + '{model="m",status="error",error_type="internal"}'
BAD = REQUESTS + '{model="m",status="error",error_type="validation"}'
COUNT = 'dynamo_frontend_time_to_first_token_seconds_count{model="m"}'
BUCKET = f'dynamo_frontend_time_to_first_token_seconds_bucket{{model="m",le="{FIRST_TOKEN_LE}"}}'
STATUS = 'dynamo_worker_status{worker_id="w%d"}'


def states(*values: int) -> dict[str, str]:
    """Return one worker in each of these states."""
    return {STATUS % n: f"{value}x200" for n, value in enumerate(values)}


CASES = {
    "HoldfastSilentCorruption": Case(
        fires={'dynamo_canary_failures_total{worker_id="w1",reason="token_mismatch"}': "0x150 1x60"},
        calm=grows('dynamo_canary_failures_total{worker_id="w1",reason="timeout"}', 1),
        labels=WORKER,
    ),
    "HoldfastWorkersFailing": Case(fires=states(0, 0, 0, 4), calm=states(*[0] * 9, 3, 3)),
    "HoldfastCapacityDegraded": Case(
        fires=stays('holdfast_degradation_level{model="m"}', 2),
        calm={'holdfast_degradation_level{model="m"}': "0x155 1x6 0x60"},
        labels=MODEL,
    ),
    "HoldfastCapacityCritical": Case(
        fires=stays('holdfast_degradation_level{model="m"}', 3),
        calm=stays('holdfast_degradation_level{model="m"}', 2),
        labels=MODEL,
    ),
    "HoldfastNoRoutableWorker": Case(
        fires=stays('holdfast_model_routable_weight{model="m"}', 0, 3),
        calm=stays('holdfast_model_routable_weight{model="m"}', 0.5, 3),
        labels=MODEL,
    ),
    "HoldfastSuspectServing": Case(
        fires=stays('holdfast_worker_suspect{worker_id="w1"}', 1),
        calm=stays('holdfast_worker_suspect{worker_id="w1"}', 0),
        labels=WORKER,
    ),
    "HoldfastPanic": Case(
        fires=stays('holdfast_panic{model="m"}', 1), calm=stays('holdfast_panic{model="m"}', 0), labels=MODEL
    ),
    "HoldfastExposureUnknown": Case(
        fires={'holdfast_exposure_unknown_total{worker_id="w1"}': "0x150 1x60"},
        calm={'holdfast_exposure_unknown_total{worker_id="w1"}': "1x200"},
        labels=WORKER,
    ),
    "HoldfastGoldenDisputed": Case(
        fires={'holdfast_golden_disputes_total{worker_id="w1"}': "0x150 1x60"},
        calm={'holdfast_golden_disputes_total{worker_id="w1"}': "1x200"},
    ),
    "HoldfastStreamsLost": Case(
        fires=grows('dynamo_frontend_model_migration_duration_seconds_count{model="m",outcome="failure"}', 1),
        calm=grows('dynamo_frontend_model_migration_duration_seconds_count{model="m",outcome="success"}', 1),
        labels=MODEL,
    ),
    "HoldfastRefusals": Case(
        fires=grows('dynamo_frontend_model_rejection_total{model="m",endpoint="completions"}', 1)
        | grows(ASKED, 9),
        calm=grows('dynamo_frontend_model_rejection_total{model="m",endpoint="completions"}', 1)
        | grows(ASKED, 99),
        labels=MODEL,
    ),
    "HoldfastNoLeader": Case(
        fires={'holdfast_leader{process="a"}': "0x200", 'holdfast_leader{process="b"}': "0x200"},
        calm={'holdfast_leader{process="a"}': "0x200", 'holdfast_leader{process="b"}': "1x159 _ 1x40"},
    ),
    "HoldfastObserverBlind": Case(
        fires=stays("holdfast_observer_blind", 1), calm={"holdfast_observer_blind": "0x157 1x3 0x60"}
    ),
    "HoldfastJournalUnreachable": Case(
        fires={
            f'holdfast_journal_reachable{{process="{n}"}}': f"{n // 3}x100 _ {n // 3}x100" for n in range(4)
        },
        calm={f'holdfast_journal_reachable{{process="{n}"}}': f"{n // 2}x200" for n in range(4)}
        | {'holdfast_journal_reachable{process="4"}': "1x159 _ 0 1x40"},
    ),
    "HoldfastJournalFull": Case(
        fires=stays("holdfast_journal_full_in_seconds", DAY_S - 1, 3 * DAY_S),
        calm=stays("holdfast_journal_full_in_seconds", DAY_S, 3 * DAY_S),
    ),
    "HoldfastJournalFullSoon": Case(
        fires=stays("holdfast_journal_full_in_seconds", 7 * DAY_S - 1, 30 * DAY_S),
        calm=stays("holdfast_journal_full_in_seconds", 7 * DAY_S, 30 * DAY_S),
    ),
    "HoldfastJournalDiskLow": Case(
        fires=stays("holdfast_journal_free_bytes", 1e9, 1e12),
        calm=stays("holdfast_journal_free_bytes", 1.1e9, 1e12),
    ),
    "HoldfastCertificateExpiring": Case(
        fires=stays("holdfast_broker_certificate_ends_timestamp_seconds", 14 * DAY_S, 90 * DAY_S),
        calm=stays("holdfast_broker_certificate_ends_timestamp_seconds", 15 * DAY_S, 90 * DAY_S),
    ),
    "HoldfastSpoolGrowing": Case(
        fires=grows('holdfast_spool_depth{process="a",role="worker"}', 2),
        calm=stays('holdfast_spool_depth{process="a",role="worker"}', 100),
        labels={"process": "a", "role": "worker"},
    ),
    "HoldfastFactsDropped": Case(
        fires={'holdfast_facts_dropped_total{process="a",role="worker"}': "0x150 1x60"},
        calm={'holdfast_facts_dropped_total{process="a",role="worker"}': "1x200"},
        labels={"process": "a", "role": "worker"},
    ),
    "HoldfastStateStoreStuck": Case(
        fires=stays("holdfast_projector_lag", 7) | {"holdfast_projector_events_total": "500x200"},
        calm=stays("holdfast_projector_lag", 7) | grows("holdfast_projector_events_total", 5),
    ),
    "HoldfastStateStoreBehind": Case(
        fires=stays("holdfast_projector_lag", 1001), calm=stays("holdfast_projector_lag", 1000)
    ),
    "HoldfastWorkersMissing": Case(
        fires=stays("holdfast_workers_reporting", 2, 3) | {"holdfast_workers_registered": "3x200"},
        calm={"holdfast_workers_reporting": "3x157 2x3 3x60", "holdfast_workers_registered": "3x200"},
    ),
    "HoldfastBreakerFlapping": Case(
        fires={'dynamo_circuit_breaker_state{worker_id="w1"}': "0x4 " + "1x1 2x1 0x4 " * 30},
        calm={'dynamo_circuit_breaker_state{worker_id="w1"}': "0x120 1x1 2x1 0x100"},
        labels=WORKER,
    ),
    "HoldfastPlaceEmpty": Case(
        fires=stays('holdfast_places_empty{model="m"}', 1),
        calm={'holdfast_places_empty{model="m"}': "0x145 1x10 0x60"},
        labels=MODEL,
    ),
    "HoldfastWorkersLingering": Case(
        fires=stays("holdfast_workers_lingering", 1), calm={"holdfast_workers_lingering": "0x145 1x10 0x60"}
    ),
    "HoldfastTokensUnlikely": Case(
        fires={'holdfast_tokens_unlikely_total{worker_id="w1"}': "0x120 1x100"},
        calm={'holdfast_tokens_unlikely_total{worker_id="w1"}': "3x210"},
        labels=WORKER,
    ),
    "HoldfastWorkerNameTaken": Case(
        fires={"holdfast_worker_names_taken_total": "0x150 1x60"},
        calm={"holdfast_worker_names_taken_total": "1x210"},
    ),
    "HoldfastWebhooksFailing": Case(
        fires=stays('holdfast_webhook_failures_in_a_row{webhook="ops"}', 5),
        calm=stays('holdfast_webhook_failures_in_a_row{webhook="ops"}', 4)
        | {'holdfast_webhook_stopped{webhook="ops"}': "0x200"}
        | {'holdfast_webhook_deliveries_total{webhook="ops",outcome="dead_letter"}': "0x20 1x180"},
        labels={"webhook": "ops"},
    ),
    "HoldfastTargetDown": Case(
        fires=stays('up{job="holdfast",role="worker",process="w1"}', 0, 1),
        calm={'up{job="holdfast",role="worker",process="w1"}': "1x158 0 1x60"},
        labels={"job": "holdfast", "role": "worker", "process": "w1"},
    ),
    "HoldfastErrorBudgetBurnFast": Case(
        fires=grows(ASKED, 95) | grows(FAILED, 5), calm=grows(ASKED, 95) | grows(BAD, 5), labels=MODEL
    ),
    "HoldfastErrorBudgetBurnSlow": Case(
        fires=grows(ASKED, 990) | grows(FAILED, 10), calm=grows(ASKED, 999) | grows(FAILED, 1), labels=MODEL
    ),
    "HoldfastFirstTokensLateFast": Case(
        fires=grows(COUNT, 100) | grows(BUCKET, 95), calm=grows(COUNT, 100) | grows(BUCKET, 99), labels=MODEL
    ),
    "HoldfastFirstTokensLateSlow": Case(
        fires=grows(COUNT, 100) | grows(BUCKET, 99),
        calm=grows(COUNT, 1000) | grows(BUCKET, 999),
        labels=MODEL,
    ),
}
BY_NAME = {alert.name: alert for alert in ALERTS}


def unit_test(name: str, series: Mapping[str, str], fires: bool) -> dict[str, object]:
    """Return a Prometheus unit test that checks whether one alert is firing."""
    labels = {
        "alertname": name,
        "alertstate": "firing",
        "severity": BY_NAME[name].severity,
        **CASES[name].labels,
    }
    shown = "ALERTS{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"
    return {
        "interval": f"{EVERY_S}s",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'ALERTS{{alertname="{name}",alertstate="firing"}}',
                "eval_time": AT,
                "exp_samples": [{"labels": shown, "value": 1}] if fires else [],
            }
        ],
    }


def promtool(*words: str) -> None:
    done = subprocess.run([binary("promtool"), *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_file_matches_its_source() -> None:
    assert RULES.read_text() == text(), "`make dashboards` regenerates it"


def test_prometheus_accepts_the_rules() -> None:
    promtool("check", "rules", str(RULES))


def test_each_alert_has_a_case() -> None:
    assert CASES.keys() == BY_NAME.keys()
    assert {alert.board for alert in ALERTS} <= {board.uid for board in BOARDS}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_only_when_it_should(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tests = {
        "rule_files": [str(RULES)],
        "evaluation_interval": f"{EVERY_S}s",
        "tests": [unit_test(name, case.fires, True), unit_test(name, case.calm, False)],
    }
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps(tests))
    promtool("test", "rules", str(file))


def test_b28_the_severity_grows_with_the_level_and_each_alert_links_to_a_runbook() -> None:
    """Levels 1 and 2 warn, 3 and 4 are critical. The seed paged for level 1 alike, without a runbook."""
    warning, critical = BY_NAME["HoldfastCapacityDegraded"], BY_NAME["HoldfastCapacityCritical"]
    assert (warning.severity, critical.severity) == ("warning", "critical")
    assert warning.expr.endswith("> 0 < 3") and critical.expr.endswith(">= 3")
    for alert in ALERTS:
        assert (Path(__file__).parents[2] / alert.runbook_url).is_file() and alert.dashboard_url.startswith(
            "/d/holdfast-"
        )


@pytest.mark.parametrize("rule", [*ALERTS, *RECORDED], ids=lambda rule: rule.name)
def test_every_metric_and_label_of_a_rule_exists(rule: object) -> None:
    expr = rule.expr  # type: ignore[attr-defined]
    for selector in selectors(re.sub(r"holdfast:[\w:]+", "up", expr)):
        metric = base(selector.name)
        if metric == "up":
            continue
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert metric in KNOWN and labels <= KNOWN[metric][1] | OF_TARGETS
    assert set(re.findall(r"holdfast:[\w:]+", expr)) <= RECORDED_NAMES


@pytest.mark.slow
@pytest.mark.parametrize(
    "series",
    [
        {'holdfast_webhook_stopped{webhook="ops"}': "0x80 1x120"},
        {'holdfast_webhook_deliveries_total{webhook="ops",outcome="dead_letter"}': "0x150 1x60"},
    ],
)
def test_a_stopped_webhook_and_a_dead_letter_fire_the_alert(
    series: Mapping[str, str], tmp_path: Path
) -> None:
    tests = [unit_test("HoldfastWebhooksFailing", series, True)]
    file = tmp_path / "tests.yaml"
    file.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": f"{EVERY_S}s", "tests": tests})
    )
    promtool("test", "rules", str(file))
