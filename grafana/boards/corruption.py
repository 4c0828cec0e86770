"""Silent corruption: who was convicted, by what, and which answers it had touched."""

from grafana.boards.common import history, rate
from grafana.model import GREEN, ORANGE, RED, WORKER, Dashboard, Panel, Query, Row

W = 'worker_id=~"$worker"'
WRONG = 'reason=~"token_mismatch|logit_drift|non_finite"'

BOARD = Dashboard(
    uid="holdfast-corruption",
    title="Silent corruption",
    says="Who was convicted, by what, and which answers it had touched",
    variables=[WORKER],
    rows=[
        Row(
            title="Who answers wrongly",
            panels=[
                Panel(
                    title="Wrong answers", says="Canaries that were answered wrongly, in the last hour",
                    asks=[Query(
                        ask="round(sum(max by (worker_id, reason) (increase("
                        f"dynamo_canary_failures_total{{{W},{WRONG}}}[1h])))) or vector(0)",
                        instant=True, legend="wrong",
                    )],
                    kind="stat", width=6, height=5, steps=((None, GREEN), (1, RED)),
                ),
                Panel(
                    title="Disputes", says="Confirmed answers that contradict another worker's golden, in the last hour",
                    asks=[Query(
                        ask=f"round(sum(max by (worker_id) (increase(holdfast_golden_disputes_total{{{W}}}[1h])))) or vector(0)",
                        instant=True, legend="disputes",
                    )],
                    kind="stat", width=6, height=5, steps=((None, GREEN), (1, ORANGE)),
                ),
                Panel(
                    title="Wrong answers of each worker", says="By what was wrong",
                    asks=[rate("dynamo_canary_failures_total", f"{W},{WRONG}", "worker_id, reason", "{{worker_id}} {{reason}}")],
                    width=12, height=5,
                ),
                Panel(
                    title="Unlikely tokens", says="Findings in an hour that a worker draws too unlikely tokens, and serves on",
                    asks=[Query(
                        ask=f"sum by (worker_id) (increase(holdfast_tokens_unlikely_total{{{W}}}[1h]))", legend="{{worker_id}}",
                    )],
                    width=12,
                ),
                Panel(
                    title="Suspects in service", says="1 while a convicted worker serves because no other of its model does",
                    asks=[Query(ask=f"max by (worker_id) (holdfast_worker_suspect{{{W}}})", legend="{{worker_id}}")], width=12,
                ),
                Panel(
                    title="Convictions", says="By which canary, and with which incident",
                    asks=[history("""SELECT at, worker, body->>'reason' AS reason, body->>'canary' AS canary, incident
                        FROM holdfast.fleet_events WHERE kind = 'canary_failed' AND body->>'reason' IN
                        ('token_mismatch', 'logit_drift', 'non_finite') AND $__timeFilter(at) ORDER BY at DESC LIMIT 200""")],
                    kind="table", width=12,
                ),
                Panel(
                    title="Goldens", says="What each canary's right answer is taken to be, and whether workers agree on it",
                    asks=[history("SELECT canary_key, canary, status, agreed FROM holdfast.goldens ORDER BY canary_key, canary")],
                    kind="table", width=12,
                ),
            ],
        ),
        Row(
            title="Who was hurt",
            panels=[
                Panel(
                    title="Exposed requests", says="Requests that a convicted worker had fed, by what was done with them",
                    asks=[rate("holdfast_requests_exposed_total", by="action", legend="{{action}}")], width=12,
                ),
                Panel(
                    title="Unknown", says="Spans of convicted workers of which a frontend cannot say whom they served",
                    asks=[rate("holdfast_exposure_unknown_total", W, "worker_id", "{{worker_id}}")], width=12,
                ),
                Panel(
                    title="Which", says="Ranges of tokens that a convicted worker produced",
                    asks=[history("""SELECT at, worker, request, model, first, last, finished, action FROM holdfast.exposures
                        WHERE $__timeFilter(at) ORDER BY at DESC LIMIT 200""")],
                    kind="table", width=24,
                ),
            ],
        ),
    ],
)  # fmt: skip
