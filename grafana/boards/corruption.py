"""Silent corruption dashboard: convictions, their evidence, and exposed requests."""

from grafana.boards.common import history, rate
from grafana.model import GREEN, ORANGE, RED, WORKER, Dashboard, Panel, Query, Row

W = 'worker_id=~"$worker"'
WRONG = 'reason=~"token_mismatch|logit_drift|non_finite"'

BOARD = Dashboard(
    uid="holdfast-corruption",
    title="Silent corruption",
    says="Convictions, their evidence, and exposed requests",
    variables=[WORKER],
    rows=[
        Row(
            title="Wrong answers",
            panels=[
                Panel(
                    title="Wrong answers", says="Canaries with wrong answers in the last hour",
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
                    title="Wrong answers by worker", says="By worker and reason",
                    asks=[rate("dynamo_canary_failures_total", f"{W},{WRONG}", "worker_id, reason", "{{worker_id}} {{reason}}")],
                    width=12, height=5,
                ),
                Panel(
                    title="Unlikely tokens", says="Findings of too unlikely sampled tokens, per hour, without conviction",
                    asks=[Query(
                        ask=f"sum by (worker_id) (increase(holdfast_tokens_unlikely_total{{{W}}}[1h]))", legend="{{worker_id}}",
                    )],
                    width=12,
                ),
                Panel(
                    title="Suspects in service", says="1 while a convicted worker serves as the last one of its model",
                    asks=[Query(ask=f"max by (worker_id) (holdfast_worker_suspect{{{W}}})", legend="{{worker_id}}")], width=12,
                ),
                Panel(
                    title="Convictions", says="With the canary and the incident",
                    asks=[history("""SELECT at, worker, body->>'reason' AS reason, body->>'canary' AS canary, incident
                        FROM holdfast.fleet_events WHERE kind = 'canary_failed' AND body->>'reason' IN
                        ('token_mismatch', 'logit_drift', 'non_finite') AND $__timeFilter(at) ORDER BY at DESC LIMIT 200""")],
                    kind="table", width=12,
                ),
                Panel(
                    title="Goldens", says="The expected answer of each canary, and whether workers agree on it",
                    asks=[history("SELECT canary_key, canary, status, agreed FROM holdfast.goldens ORDER BY canary_key, canary")],
                    kind="table", width=12,
                ),
            ],
        ),
        Row(
            title="User impact",
            panels=[
                Panel(
                    title="Exposed requests", says="Requests with tokens of a convicted worker, by the action taken",
                    asks=[rate("holdfast_requests_exposed_total", by="action", legend="{{action}}")], width=12,
                ),
                Panel(
                    title="Unknown exposure", says="Spans in which a frontend cannot name the requests of a convicted worker",
                    asks=[rate("holdfast_exposure_unknown_total", W, "worker_id", "{{worker_id}}")], width=12,
                ),
                Panel(
                    title="Exposed token ranges", says="Ranges of tokens that a convicted worker produced",
                    asks=[history("""SELECT at, worker, request, model, first, last, finished, action FROM holdfast.exposures
                        WHERE $__timeFilter(at) ORDER BY at DESC LIMIT 200""")],
                    kind="table", width=24,
                ),
            ],
        ),
    ],
)  # fmt: skip
