"""Requests and migrations dashboard: traffic, migrations and rejections."""

from grafana.boards.common import SAVED, history, quantiles, rate
from grafana.model import FRONTEND, MODEL, Dashboard, Panel, Query, Row

M = 'model=~"$model"'
F = 'model=~"$model",process=~"$frontend"'

BOARD = Dashboard("holdfast-requests", "Requests and migrations", "Traffic, migrations and rejections",
    variables=[MODEL, FRONTEND], rows=[
    Row("Traffic", [
        Panel("Requests", "Ended requests per second, by status",
            [rate("dynamo_frontend_requests_total", F, "status", "{{status}}")], unit="reqps", stacked=True),
        Panel("Errors by kind", "Requests that ended with an error, by kind of error",
            [rate("dynamo_frontend_requests_total", F + ',status="error"', "error_type", "{{error_type}}")],
            unit="reqps", stacked=True),
        Panel("In flight", "Requests at a worker, and requests that wait for one", [
            Query(f"sum(dynamo_frontend_inflight_requests{{{F}}})", "at a worker"),
            Query(f"sum(dynamo_frontend_queued_requests{{{F}}})", "waiting"),
            Query(f"sum(dynamo_frontend_active_requests{{{F}}})", "all"),
        ]),
        Panel("Prompts", "Tokens per prompt", quantiles("dynamo_frontend_input_sequence_tokens", F)),
        Panel("Answers", "Tokens per answer", quantiles("dynamo_frontend_output_sequence_tokens", F)),
        Panel("Cancelled by clients", "Requests cancelled by clients, and slow clients that were disconnected", [
            rate("dynamo_frontend_model_cancellation_total", F, legend="cancelled"),
            rate("holdfast_slow_clients_total", 'process=~"$frontend"', legend="disconnected"),
        ]),
    ]),
    Row("Migrations", [
        Panel("Streams saved", "Requests that another worker continued, by transfer or re-prefill",
            [Query(f"max by (method) (rate({SAVED}[$__rate_interval]))", "{{method}}")], stacked=True),
        Panel("Gap seen by clients", "From a request's last token before a fault to the next token",
            [Query("sum by (le) (increase(holdfast_resume_seconds_bucket[$__rate_interval]))", "{{le}}", heatmap=True)],
            kind="heatmap", unit="s"),
        Panel("Gap by cause", "99th percentile", quantiles("holdfast_resume_seconds", of=(0.99,), by="cause"), unit="s"),
        Panel("Failed attempts", "By whether they had produced tokens",
            [rate("dynamo_frontend_model_migration_total", M, "migration_type", "{{migration_type}}")], width=12),
        Panel("Stalled streams", "Streams without a token for too long at a worker that continued",
            [rate("holdfast_stalled_streams_total", legend="stalled")]),
        Panel("Interrupted requests", "Requests that wait for another worker, and preempted answers", [
            Query("sum(holdfast_parked_requests)", "lost their worker"),
            Query("sum(holdfast_put_off_requests)", "preempted"),
        ], width=12),
        Panel("Last 100 migrations", "Migrated requests, latest first", [
            history("""SELECT at, request, model, source, target, cause, method, tokens, gap_ms
                FROM holdfast.migrations WHERE $__timeFilter(at) ORDER BY at DESC LIMIT 100"""),
        ], kind="table", width=24),
    ]),
    Row("Rejections", [
        Panel("For capacity", "Requests rejected because no worker had capacity",
            [rate("dynamo_frontend_model_rejection_total", M, "model, endpoint", "{{model}} {{endpoint}}")], unit="reqps"),
        Panel("For other reasons", "Requests rejected before any work was done for them",
            [rate("holdfast_refused_requests_total", M, "reason", "{{reason}}")], unit="reqps"),
        Panel("At a limit", "Requests and connections refused or ended at a limit, by limit",
            [rate("holdfast_bound_refusals_total", by="bound", legend="{{bound}}")]),
        Panel("Queue wait", "Time that requests waited for a free worker",
            quantiles("holdfast_queue_wait_seconds", M, by="outcome", of=(0.99,)), unit="s"),
        Panel("Preemptions", "Running answers preempted for more urgent requests",
            [rate("holdfast_preempted_requests_total", M, "tier", "{{tier}}")]),
        Panel("Panic", "Frontends that ignore their local breakers, by model",
            [Query(f"sum by (model) (holdfast_panic{{{M}}})", "{{model}}")]),
    ]),
])  # fmt: skip
