"""Requests and migrations: what came, what moved, and what was refused."""

from grafana.boards.common import SAVED, history, quantiles, rate
from grafana.model import FRONTEND, MODEL, Dashboard, Panel, Query, Row

M = 'model=~"$model"'
F = 'model=~"$model",process=~"$frontend"'

BOARD = Dashboard(
    uid="holdfast-requests",
    title="Requests and migrations",
    says="What came, what moved, and what was refused",
    variables=[MODEL, FRONTEND],
    rows=[
        Row(
            title="What came",
            panels=[
                Panel(
                    title="Requests", says="Requests that ended, by how, in a second",
                    asks=[rate("dynamo_frontend_requests_total", F, "status", "{{status}}")], unit="reqps", stacked=True,
                ),
                Panel(
                    title="Errors by kind", says="Requests that ended with an error, by its kind",
                    asks=[rate("dynamo_frontend_requests_total", F + ',status="error"', "error_type", "{{error_type}}")],
                    unit="reqps", stacked=True,
                ),
                Panel(
                    title="In the air", says="Requests with a worker, and those that wait for one",
                    asks=[
                        Query(ask=f"sum(dynamo_frontend_inflight_requests{{{F}}})", legend="with a worker"),
                        Query(ask=f"sum(dynamo_frontend_queued_requests{{{F}}})", legend="waiting"),
                        Query(ask=f"sum(dynamo_frontend_active_requests{{{F}}})", legend="all"),
                    ],
                ),
                Panel(
                    title="Prompts", says="Tokens of a prompt",
                    asks=quantiles("dynamo_frontend_input_sequence_tokens", F),
                ),
                Panel(
                    title="Answers", says="Tokens of an answer",
                    asks=quantiles("dynamo_frontend_output_sequence_tokens", F),
                ),
                Panel(
                    title="Given up by clients", says="Requests that their client gave up, and clients cut off that did not read",
                    asks=[
                        rate("dynamo_frontend_model_cancellation_total", F, legend="given up"),
                        rate("holdfast_slow_clients_total", 'process=~"$frontend"', legend="cut off"),
                    ],
                ),
            ],
        ),
        Row(
            title="What moved",
            panels=[
                Panel(
                    title="Streams saved", says="Requests that went on elsewhere, by how: with their KV cache, or computed again",
                    asks=[Query(ask=f"max by (method) (rate({SAVED}[$__rate_interval]))", legend="{{method}}")], stacked=True,
                ),
                Panel(
                    title="The pause that clients saw", says="From a request's last token before a fault to the next",
                    asks=[Query(
                        ask="sum by (le) (increase(holdfast_resume_seconds_bucket[$__rate_interval]))",
                        legend="{{le}}", heatmap=True,
                    )],
                    kind="heatmap", unit="s",
                ),
                Panel(
                    title="The pause by cause", says="99 of 100 were shorter",
                    asks=quantiles("holdfast_resume_seconds", of=(0.99,), by="cause"), unit="s",
                ),
                Panel(
                    title="Attempts that failed", says="By whether they had brought tokens",
                    asks=[rate("dynamo_frontend_model_migration_total", M, "migration_type", "{{migration_type}}")],
                    width=12,
                ),
                Panel(
                    title="Streams that stalled", says="Streams that brought no token for too long although their worker went on",
                    asks=[rate("holdfast_stalled_streams_total", legend="stalled")],
                ),
                Panel(
                    title="Waiting to go on", says="Requests that wait for another worker; answers that are put off",
                    asks=[
                        Query(ask="sum(holdfast_parked_requests)", legend="lost their worker"),
                        Query(ask="sum(holdfast_put_off_requests)", legend="put off"),
                    ],
                    width=12,
                ),
                Panel(
                    title="The last hundred", says="Requests that moved",
                    asks=[history("""SELECT at, request, model, source, target, cause, method, tokens, gap_ms
                        FROM holdfast.migrations WHERE $__timeFilter(at) ORDER BY at DESC LIMIT 100""")],
                    kind="table", width=24,
                ),
            ],
        ),
        Row(
            title="What was refused",
            panels=[
                Panel(
                    title="For want of room", says="Requests turned away because nobody had room",
                    asks=[rate("dynamo_frontend_model_rejection_total", M, "model, endpoint", "{{model}} {{endpoint}}")],
                    unit="reqps",
                ),
                Panel(
                    title="For another reason", says="Requests turned away before anything was begun for them",
                    asks=[rate("holdfast_refused_requests_total", M, "reason", "{{reason}}")], unit="reqps",
                ),
                Panel(
                    title="At a bound", says="What was refused or ended at a bound, by the bound",
                    asks=[rate("holdfast_bound_refusals_total", by="bound", legend="{{bound}}")],
                ),
                Panel(
                    title="The wait for a worker", says="How long requests waited for a free worker",
                    asks=quantiles("holdfast_queue_wait_seconds", M, by="outcome", of=(0.99,)), unit="s",
                ),
                Panel(
                    title="Put off", says="Running answers that were put off for more urgent requests",
                    asks=[rate("holdfast_preempted_requests_total", M, "tier", "{{tier}}")],
                ),
                Panel(
                    title="Panic", says="Frontends that ignore their own breakers, by model",
                    asks=[Query(ask=f"sum by (model) (holdfast_panic{{{M}}})", legend="{{model}}")],
                ),
            ],
        ),
    ],
)  # fmt: skip
