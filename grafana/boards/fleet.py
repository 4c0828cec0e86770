"""Fleet dashboard: user impact, capacity, speed and workers at a glance."""

from grafana.boards.common import LEVELS, OURS, SAVED, STATES, history, link, quantiles, rate
from grafana.model import GREEN, MODEL, ORANGE, RED, WORKER, YELLOW, Dashboard, Panel, Query, Row

M = 'model=~"$model"'
LOST = "request_abandoned"

IMPACT = Row(
    title="User impact",
    panels=[
        Panel(
            title="Streams lost", says="Started streams that no worker could continue, in the last five minutes",
            asks=[history(f"""SELECT count(*) AS lost FROM holdfast.fleet_events
                WHERE kind = '{LOST}' AND at > now() - interval '5 minutes'""")],
            kind="stat", width=4, height=4, steps=((None, GREEN), (1, RED)),
        ),
        Panel(
            title="Streams saved", says="Streams that another worker continued, in the last five minutes",
            asks=[Query(
                ask=f"round(sum(max by (method) (increase({SAVED}[5m])))) or vector(0)", instant=True, legend="saved",
            )],
            kind="stat", width=4, height=4,
        ),
        Panel(
            title="Exposed requests", says="Requests with tokens of a convicted worker, in the last hour",
            asks=[Query(
                ask="round(sum(increase(holdfast_requests_exposed_total[1h]))) or vector(0)", instant=True, legend="exposed",
            )],
            kind="stat", width=4, height=4, steps=((None, GREEN), (1, RED)),
        ),
        Panel(
            title="Rejected for capacity", says="Requests per second rejected because no worker had capacity",
            asks=[rate("dynamo_frontend_model_rejection_total", M, legend="rejected")],
            kind="stat", unit="reqps", width=4, height=4, steps=((None, GREEN), (0.1, YELLOW), (1, ORANGE)),
        ),
        Panel(
            title="Open incidents", says="Incidents that are open",
            asks=[Query(ask="max(holdfast_incidents_open)", instant=True, legend="open")],
            kind="stat", width=4, height=4, steps=((None, GREEN), (1, YELLOW)),
        ),
        Panel(
            title="Errors", says="Share of requests that ended with an error, without client errors and overload",
            asks=[Query(
                ask=f'(sum(rate(dynamo_frontend_requests_total{{{M},{OURS}}}[$__rate_interval])) or vector(0))'
                f" / sum(rate(dynamo_frontend_requests_total{{{M}}}[$__rate_interval]))",
                legend="errors",
            )],
            kind="stat", unit="percentunit", width=4, height=4, steps=((None, GREEN), (0.001, YELLOW), (0.01, RED)),
        ),
    ],
)  # fmt: skip

CAPACITY = Row(
    title="Capacity",
    panels=[
        Panel(
            title="Model capacity", says="Requests per second within the objectives, as the planner estimates",
            asks=[Query(ask=f"max by (model) (holdfast_planner_achievable_rps{{{M}}})", legend="{{model}}")], unit="reqps",
        ),
        Panel(
            title="Weight in service", says="The sum of the weights of a model's workers; 1 for each at full weight",
            asks=[Query(ask=f"max by (model) (holdfast_model_routable_weight{{{M}}})", legend="{{model}}")],
        ),
        Panel(
            title="Degradation level", says="0: no degradation; 4: no new requests are admitted",
            asks=[Query(ask=f"max by (model) (holdfast_degradation_level{{{M}}})", legend="{{model}}")],
            kind="state-timeline", mappings=LEVELS,
        ),
        Panel(
            title="Spares", says="Spares that are ready, and lost workers without a replacement",
            asks=[
                Query(ask=f"max by (model) (holdfast_spares_ready{{{M}}})", legend="ready {{model}}"),
                Query(ask=f"max by (model) (holdfast_places_empty{{{M}}})", legend="not replaced {{model}}"),
            ],
        ),
        Panel(
            title="Workers and planner", says="Current workers, those needed for the forecast, those that the planner proposes",
            asks=[
                Query(ask=f"max by (model) (holdfast_planner_workers{{{M}}})", legend="current {{model}}"),
                Query(ask=f"max by (model) (holdfast_planner_workers_needed{{{M}}})", legend="needed {{model}}"),
                Query(ask=f"max by (model) (holdfast_planner_workers_wanted{{{M}}})", legend="proposed {{model}}"),
            ],
        ),
        Panel(
            title="Waiting", says="Requests that wait for a free worker, by model",
            asks=[Query(ask=f"sum by (model) (dynamo_frontend_queued_requests{{{M}}})", legend="{{model}}")],
        ),
    ],
)  # fmt: skip

SPEED = Row(
    title="Speed",
    panels=[
        Panel(
            title="Tokens", says="Tokens per second relayed to clients",
            asks=[rate("dynamo_frontend_output_tokens_total", M, "model", "{{model}}")], unit="short", stacked=True,
        ),
        Panel(
            title="Time to first token", says="From a request's arrival to its first token",
            asks=quantiles("dynamo_frontend_time_to_first_token_seconds", M), unit="s",
        ),
        Panel(
            title="Time between tokens", says="From one token to the next",
            asks=quantiles("dynamo_frontend_inter_token_latency_seconds", M), unit="s",
        ),
    ],
)  # fmt: skip

WORKERS = Row(
    title="Workers",
    panels=[
        Panel(
            title="Health", says="Each worker's state",
            asks=[Query(ask='max by (worker_id) (dynamo_worker_status{worker_id=~"$worker"})', legend="{{worker_id}}")],
            kind="state-timeline", mappings=STATES, width=24, height=8,
        ),
        Panel(
            title="Incidents", says="Latest first",
            asks=[history("""SELECT incident, opened_at, round(extract(epoch FROM closed_at - opened_at)::numeric, 1) AS lasted_s,
                subject, symptom, outcome
                FROM holdfast.incidents WHERE $__timeFilter(opened_at) ORDER BY opened_at DESC LIMIT 100""")],
            kind="table", width=14, height=9, overrides=[link("holdfast-incident", "incident")],
        ),
        Panel(
            title="Workers now", says="Each worker as the router sees it",
            asks=[history("""SELECT worker, model, health, weight, routable, breaker, reason FROM holdfast.fleet_now
                ORDER BY worker""")],
            kind="table", width=10, height=9, overrides=[link("holdfast-worker", "worker")],
        ),
    ],
)  # fmt: skip

BOARD = Dashboard(
    uid="holdfast-fleet", title="Fleet", says="User impact, capacity, speed and workers at a glance",
    rows=[IMPACT, CAPACITY, SPEED, WORKERS], variables=[MODEL, WORKER],
)  # fmt: skip
