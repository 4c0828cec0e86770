"""Router dashboard: prefix cache hits and load balance."""

from grafana.boards.common import quantiles, rate
from grafana.model import FRONTEND, MODEL, WORKER, Dashboard, Panel, Query, Row

F = 'model=~"$model",process=~"$frontend"'
P = 'process=~"$frontend"'
W = 'worker_id=~"$worker"'

BOARD = Dashboard("holdfast-router", "Router", "Prefix cache hits and load balance",
    variables=[MODEL, FRONTEND, WORKER], rows=[
    Row("Prefixes", [
        Panel("Hit rate", "Share of a prompt's blocks that the chosen worker has cached", [
            Query(f"sum(rate(holdfast_router_kv_hit_rate_sum{{{F}}}[$__rate_interval]))"
                f" / sum(rate(holdfast_router_kv_hit_rate_count{{{F}}}[$__rate_interval]))", "mean"),
        ], unit="percentunit", most=1.0),
        Panel("Blocks found", "Blocks of a prompt that the chosen worker has cached",
            quantiles("holdfast_router_overlap_blocks", F)),
        Panel("Tokens found", "Prompt tokens found in a prefix cache", quantiles("dynamo_frontend_cached_tokens", F)),
        Panel("Routing decisions", "Routing decisions by router mode",
            [rate("holdfast_router_decisions_total", F, "mode", "{{mode}}")]),
        Panel("Index", "KV blocks that workers report, and those that are estimated", [
            Query(f"max by (process) (holdfast_router_kv_blocks{{{P}}})", "reported {{process}}"),
            Query(f"max by (process) (holdfast_router_guessed_blocks{{{P}}})", "estimated {{process}}"),
        ]),
        Panel("Ranks", "DP ranks that publish KV events, and those with missing events",
            [Query('max by (state) (holdfast_router_kv_ranks{process=~"$frontend"})', "{{state}}")]),
        Panel("KV events", "Per second, by status", [rate("holdfast_router_kv_events_total", P, "status", "{{status}}")]),
        Panel("Gap recovery", "Gaps in the received KV events, by outcome of their recovery",
            [rate("holdfast_router_kv_recoveries_total", P, "outcome", "{{outcome}}")]),
        Panel("KV events lost", "KV events of workers that the broker did not accept",
            [rate("holdfast_worker_kv_events_lost_total", W, "worker_id", "{{worker_id}}")]),
    ]),
    Row("Load", [
        Panel("Requests by worker", "As workers count them",
            [Query(f"sum by (worker_id) (dynamo_component_inflight_requests{{{W}}})", "{{worker_id}}")], stacked=True),
        Panel("Pending prompt tokens", "Prompt tokens sent to a worker and not read yet, as frontends count",
            [Query(f"sum by (worker_id) (dynamo_frontend_worker_active_prefill_tokens{{{W}}})", "{{worker_id}}")],
            stacked=True),
        Panel("KV blocks in use", "As workers report",
            [Query(f"max by (worker_id) (dynamo_frontend_worker_active_decode_blocks{{{W}}})", "{{worker_id}}")]),
        Panel("Waiting at workers", "Requests that wait at a worker's DP ranks",
            [Query(f"max by (worker_id) (dynamo_frontend_worker_waiting_requests{{{W}}})", "{{worker_id}}")]),
        Panel("Imbalance", "Token rate of the busiest worker, divided by the mean", [
            Query(f"max(sum by (worker_id) (rate(holdfast_worker_tokens_total{{{W}}}[$__rate_interval])))"
                f" / avg(sum by (worker_id) (rate(holdfast_worker_tokens_total{{{W}}}[$__rate_interval])))", "maximum / mean"),
        ]),
        Panel("Late event loops", "Late ticks of a frontend's event loop, and workers that it found hung", [
            Query('sum by (process) (holdfast_late_ticks{process=~"$frontend"})', "late {{process}}"),
            Query('sum by (process) (holdfast_worker_hangs{process=~"$frontend"})', "hung {{process}}"),
        ]),
    ]),
])  # fmt: skip
