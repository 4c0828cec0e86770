"""Silent corruption dashboard: convictions, their evidence, and exposed requests."""

from grafana.boards.common import history, rate
from grafana.model import GREEN, ORANGE, RED, WORKER, Dashboard, Panel, Query, Row

W = 'worker_id=~"$worker"'
WRONG = 'reason=~"token_mismatch|logit_drift|non_finite"'

BOARD = Dashboard("holdfast-corruption", "Silent corruption", "Convictions, their evidence, and exposed requests",
    variables=[WORKER], rows=[
    Row("Wrong answers", [
        Panel("Wrong answers", "Canaries with wrong answers in the last hour", [
            Query("round(sum(max by (worker_id, reason) (increase("
                f"dynamo_canary_failures_total{{{W},{WRONG}}}[1h])))) or vector(0)", "wrong", instant=True),
        ], kind="stat", width=6, height=5, steps=((None, GREEN), (1, RED))),
        Panel("Disputes", "Confirmed answers that contradict another worker's golden, in the last hour", [
            Query(f"round(sum(max by (worker_id) (increase(holdfast_golden_disputes_total{{{W}}}[1h])))) or vector(0)",
                "disputes", instant=True),
        ], kind="stat", width=6, height=5, steps=((None, GREEN), (1, ORANGE))),
        Panel("Wrong answers by worker", "By worker and reason",
            [rate("dynamo_canary_failures_total", f"{W},{WRONG}", "worker_id, reason", "{{worker_id}} {{reason}}")],
            width=12, height=5),
        Panel("Unlikely tokens", "Findings of too unlikely sampled tokens, per hour, without conviction",
            [Query(f"sum by (worker_id) (increase(holdfast_tokens_unlikely_total{{{W}}}[1h]))", "{{worker_id}}")], width=12),
        Panel("Suspects in service", "1 while a convicted worker serves as the last one of its model",
            [Query(f"max by (worker_id) (holdfast_worker_suspect{{{W}}})", "{{worker_id}}")], width=12),
        Panel("Convictions", "With the canary and the incident", [
            history("""SELECT at, worker, body->>'reason' AS reason, body->>'canary' AS canary, incident
                FROM holdfast.fleet_events WHERE kind = 'canary_failed' AND body->>'reason' IN
                ('token_mismatch', 'logit_drift', 'non_finite') AND $__timeFilter(at) ORDER BY at DESC LIMIT 200"""),
        ], kind="table", width=12),
        Panel("Goldens", "The expected answer of each canary, and whether workers agree on it",
            [history("SELECT canary_key, canary, status, agreed FROM holdfast.goldens ORDER BY canary_key, canary")],
            kind="table", width=12),
    ]),
    Row("User impact", [
        Panel("Exposed requests", "Requests with tokens of a convicted worker, by the action taken",
            [rate("holdfast_requests_exposed_total", by="action", legend="{{action}}")], width=12),
        Panel("Unknown exposure", "Spans in which a frontend cannot name the requests of a convicted worker",
            [rate("holdfast_exposure_unknown_total", W, "worker_id", "{{worker_id}}")], width=12),
        Panel("Exposed token ranges", "Ranges of tokens that a convicted worker produced", [
            history("""SELECT at, worker, request, model, first, last, finished, action FROM holdfast.exposures
                WHERE $__timeFilter(at) ORDER BY at DESC LIMIT 200"""),
        ], kind="table", width=24),
    ]),
])  # fmt: skip
