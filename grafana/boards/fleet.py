"""Fleet dashboard: user impact, capacity, speed and workers at a glance."""

from grafana.boards.common import LEVELS, OURS, SAVED, STATES, history, link, quantiles, rate
from grafana.model import GREEN, MODEL, ORANGE, RED, WORKER, YELLOW, Dashboard, Panel, Query, Row

M = 'model=~"$model"'
LOST = "request_abandoned"

IMPACT = Row("User impact", [
    Panel("Streams lost", "Started streams that no worker could continue, in the last five minutes", [
        history(f"""SELECT count(*) AS lost FROM holdfast.fleet_events
            WHERE kind = '{LOST}' AND at > now() - interval '5 minutes'"""),
    ], kind="stat", width=4, height=4, steps=((None, GREEN), (1, RED))),
    Panel("Streams saved", "Streams that another worker continued, in the last five minutes",
        [Query(f"round(sum(max by (method) (increase({SAVED}[5m])))) or vector(0)", "saved", instant=True)],
        kind="stat", width=4, height=4),
    Panel("Exposed requests", "Requests with tokens of a convicted worker, in the last hour",
        [Query("round(sum(increase(holdfast_requests_exposed_total[1h]))) or vector(0)", "exposed", instant=True)],
        kind="stat", width=4, height=4, steps=((None, GREEN), (1, RED))),
    Panel("Rejected for capacity", "Requests per second rejected because no worker had capacity",
        [rate("dynamo_frontend_model_rejection_total", M, legend="rejected")],
        kind="stat", unit="reqps", width=4, height=4, steps=((None, GREEN), (0.1, YELLOW), (1, ORANGE))),
    Panel("Open incidents", "Incidents that are open",
        [Query("max(holdfast_incidents_open)", "open", instant=True)],
        kind="stat", width=4, height=4, steps=((None, GREEN), (1, YELLOW))),
    Panel("Errors", "Share of requests that ended with an error, without client errors and overload", [
        Query(f'(sum(rate(dynamo_frontend_requests_total{{{M},{OURS}}}[$__rate_interval])) or vector(0))'
            f" / sum(rate(dynamo_frontend_requests_total{{{M}}}[$__rate_interval]))", "errors"),
    ], kind="stat", unit="percentunit", width=4, height=4, steps=((None, GREEN), (0.001, YELLOW), (0.01, RED))),
])  # fmt: skip

CAPACITY = Row("Capacity", [
    Panel("Model capacity", "Requests per second within the objectives, as the planner estimates",
        [Query(f"max by (model) (holdfast_planner_achievable_rps{{{M}}})", "{{model}}")], unit="reqps"),
    Panel("Weight in service", "The sum of the weights of a model's workers; 1 for each at full weight",
        [Query(f"max by (model) (holdfast_model_routable_weight{{{M}}})", "{{model}}")]),
    Panel("Degradation level", "0: no degradation; 4: no new requests are admitted",
        [Query(f"max by (model) (holdfast_degradation_level{{{M}}})", "{{model}}")], kind="state-timeline", mappings=LEVELS),
    Panel("Spares", "Spares that are ready, and lost workers without a replacement", [
        Query(f"max by (model) (holdfast_spares_ready{{{M}}})", "ready {{model}}"),
        Query(f"max by (model) (holdfast_places_empty{{{M}}})", "not replaced {{model}}"),
    ]),
    Panel("Workers and planner", "Current workers, those needed for the forecast, those that the planner proposes", [
        Query(f"max by (model) (holdfast_planner_workers{{{M}}})", "current {{model}}"),
        Query(f"max by (model) (holdfast_planner_workers_needed{{{M}}})", "needed {{model}}"),
        Query(f"max by (model) (holdfast_planner_workers_wanted{{{M}}})", "proposed {{model}}"),
    ]),
    Panel("Waiting", "Requests that wait for a free worker, by model",
        [Query(f"sum by (model) (dynamo_frontend_queued_requests{{{M}}})", "{{model}}")]),
])  # fmt: skip

SPEED = Row("Speed", [
    Panel("Tokens", "Tokens per second relayed to clients",
        [rate("dynamo_frontend_output_tokens_total", M, "model", "{{model}}")], unit="short", stacked=True),
    Panel("Time to first token", "From a request's arrival to its first token",
        quantiles("dynamo_frontend_time_to_first_token_seconds", M), unit="s"),
    Panel("Time between tokens", "From one token to the next",
        quantiles("dynamo_frontend_inter_token_latency_seconds", M), unit="s"),
])  # fmt: skip

WORKERS = Row("Workers", [
    Panel("Health", "Each worker's state",
        [Query('max by (worker_id) (dynamo_worker_status{worker_id=~"$worker"})', "{{worker_id}}")],
        kind="state-timeline", mappings=STATES, width=24, height=8),
    Panel("Incidents", "Latest first", [
        history("""SELECT incident, opened_at, round(extract(epoch FROM closed_at - opened_at)::numeric, 1) AS lasted_s,
            subject, symptom, outcome
            FROM holdfast.incidents WHERE $__timeFilter(opened_at) ORDER BY opened_at DESC LIMIT 100"""),
    ], kind="table", width=14, height=9, overrides=[link("holdfast-incident", "incident")]),
    Panel("Workers now", "Each worker as the router sees it", [
        history("""SELECT worker, model, health, weight, routable, breaker, reason FROM holdfast.fleet_now
            ORDER BY worker"""),
    ], kind="table", width=10, height=9, overrides=[link("holdfast-worker", "worker")]),
])  # fmt: skip

BOARD = Dashboard("holdfast-fleet", "Fleet", "User impact, capacity, speed and workers at a glance",
    variables=[MODEL, WORKER], rows=[IMPACT, CAPACITY, SPEED, WORKERS])  # fmt: skip
