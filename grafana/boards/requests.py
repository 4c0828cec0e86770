"""Requests and migrations dashboard: traffic, migrations and rejections."""

from grafana.boards.common import SAVED, history, quantiles, rate
from grafana.model import FRONTEND, MODEL, Dashboard, Panel, Query, Row

M = 'model=~"$model"'
F = 'model=~"$model",process=~"$frontend"'

BOARD = Dashboard(
    uid="holdfast-requests",
    title="Requests and migrations",
    says="Traffic, migrations and rejections",
    variables=[MODEL, FRONTEND],
    rows=[
        Row(
            title="Traffic",
            panels=[
                Panel(
                    title="Requests", says="Ended requests per second, by status",
                    asks=[rate("dynamo_frontend_requests_total", F, "status", "{{status}}")], unit="reqps", stacked=True,
                ),
                Panel(
                    title="Errors by kind", says="Requests that ended with an error, by kind of error",
                    asks=[rate("dynamo_frontend_requests_total", F + ',status="error"', "error_type", "{{error_type}}")],
                    unit="reqps", stacked=True,
                ),
                Panel(
                    title="In flight", says="Requests at a worker, and requests that wait for one",
                    asks=[
                        Query(ask=f"sum(dynamo_frontend_inflight_requests{{{F}}})", legend="at a worker"),
                        Query(ask=f"sum(dynamo_frontend_queued_requests{{{F}}})", legend="waiting"),
                        Query(ask=f"sum(dynamo_frontend_active_requests{{{F}}})", legend="all"),
                    ],
                ),
                Panel(
                    title="Prompts", says="Tokens per prompt",
                    asks=quantiles("dynamo_frontend_input_sequence_tokens", F),
                ),
                Panel(
                    title="Answers", says="Tokens per answer",
                    asks=quantiles("dynamo_frontend_output_sequence_tokens", F),
                ),
                Panel(
                    title="Cancelled by clients", says="Requests cancelled by clients, and slow clients that were disconnected",
                    asks=[
                        rate("dynamo_frontend_model_cancellation_total", F, legend="cancelled"),
                        rate("holdfast_slow_clients_total", 'process=~"$frontend"', legend="disconnected"),
                    ],
                ),
            ],
        ),
        Row(
            title="Migrations",
            panels=[
                Panel(
                    title="Streams saved", says="Requests that another worker continued, by transfer or re-prefill",
                    asks=[Query(ask=f"max by (method) (rate({SAVED}[$__rate_interval]))", legend="{{method}}")], stacked=True,
                ),
                Panel(
                    title="Gap seen by clients", says="From a request's last token before a fault to the next token",
                    asks=[Query(
                        ask="sum by (le) (increase(holdfast_resume_seconds_bucket[$__rate_interval]))",
                        legend="{{le}}", heatmap=True,
                    )],
                    kind="heatmap", unit="s",
                ),
                Panel(
                    title="Gap by cause", says="99th percentile",
                    asks=quantiles("holdfast_resume_seconds", of=(0.99,), by="cause"), unit="s",
                ),
                Panel(
                    title="Failed attempts", says="By whether they had produced tokens",
                    asks=[rate("dynamo_frontend_model_migration_total", M, "migration_type", "{{migration_type}}")],
                    width=12,
                ),
                Panel(
                    title="Stalled streams", says="Streams without a token for too long at a worker that continued",
                    asks=[rate("holdfast_stalled_streams_total", legend="stalled")],
                ),
                Panel(
                    title="Interrupted requests", says="Requests that wait for another worker, and preempted answers",
                    asks=[
                        Query(ask="sum(holdfast_parked_requests)", legend="lost their worker"),
                        Query(ask="sum(holdfast_put_off_requests)", legend="preempted"),
                    ],
                    width=12,
                ),
                Panel(
                    title="Last 100 migrations", says="Migrated requests, latest first",
                    asks=[history("""SELECT at, request, model, source, target, cause, method, tokens, gap_ms
                        FROM holdfast.migrations WHERE $__timeFilter(at) ORDER BY at DESC LIMIT 100""")],
                    kind="table", width=24,
                ),
            ],
        ),
        Row(
            title="Rejections",
            panels=[
                Panel(
                    title="For capacity", says="Requests rejected because no worker had capacity",
                    asks=[rate("dynamo_frontend_model_rejection_total", M, "model, endpoint", "{{model}} {{endpoint}}")],
                    unit="reqps",
                ),
                Panel(
                    title="For other reasons", says="Requests rejected before any work was done for them",
                    asks=[rate("holdfast_refused_requests_total", M, "reason", "{{reason}}")], unit="reqps",
                ),
                Panel(
                    title="At a limit", says="Requests and connections refused or ended at a limit, by limit",
                    asks=[rate("holdfast_bound_refusals_total", by="bound", legend="{{bound}}")],
                ),
                Panel(
                    title="Queue wait", says="Time that requests waited for a free worker",
                    asks=quantiles("holdfast_queue_wait_seconds", M, by="outcome", of=(0.99,)), unit="s",
                ),
                Panel(
                    title="Preemptions", says="Running answers preempted for more urgent requests",
                    asks=[rate("holdfast_preempted_requests_total", M, "tier", "{{tier}}")],
                ),
                Panel(
                    title="Panic", says="Frontends that ignore their local breakers, by model",
                    asks=[Query(ask=f"sum by (model) (holdfast_panic{{{M}}})", legend="{{model}}")],
                ),
            ],
        ),
    ],
)  # fmt: skip
