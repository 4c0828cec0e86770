"""Router dashboard: prefix cache hits and load balance."""

from grafana.boards.common import quantiles, rate
from grafana.model import FRONTEND, MODEL, WORKER, Dashboard, Panel, Query, Row

F = 'model=~"$model",process=~"$frontend"'
P = 'process=~"$frontend"'
W = 'worker_id=~"$worker"'

BOARD = Dashboard(
    uid="holdfast-router",
    title="Router",
    says="Prefix cache hits and load balance",
    variables=[MODEL, FRONTEND, WORKER],
    rows=[
        Row(
            title="Prefixes",
            panels=[
                Panel(
                    title="Hit rate", says="Share of a prompt's blocks that the chosen worker has cached",
                    asks=[Query(
                        ask=f"sum(rate(holdfast_router_kv_hit_rate_sum{{{F}}}[$__rate_interval]))"
                        f" / sum(rate(holdfast_router_kv_hit_rate_count{{{F}}}[$__rate_interval]))",
                        legend="mean",
                    )],
                    unit="percentunit", most=1.0,
                ),
                Panel(
                    title="Blocks found", says="Blocks of a prompt that the chosen worker has cached",
                    asks=quantiles("holdfast_router_overlap_blocks", F),
                ),
                Panel(
                    title="Tokens found", says="Prompt tokens found in a prefix cache",
                    asks=quantiles("dynamo_frontend_cached_tokens", F),
                ),
                Panel(
                    title="Routing decisions", says="Routing decisions by router mode",
                    asks=[rate("holdfast_router_decisions_total", F, "mode", "{{mode}}")],
                ),
                Panel(
                    title="Index", says="KV blocks that workers report, and those that are estimated",
                    asks=[
                        Query(ask=f"max by (process) (holdfast_router_kv_blocks{{{P}}})", legend="reported {{process}}"),
                        Query(ask=f"max by (process) (holdfast_router_guessed_blocks{{{P}}})", legend="estimated {{process}}"),
                    ],
                ),
                Panel(
                    title="Ranks", says="DP ranks that publish KV events, and those with missing events",
                    asks=[Query(ask='max by (state) (holdfast_router_kv_ranks{process=~"$frontend"})', legend="{{state}}")],
                ),
                Panel(
                    title="KV events", says="Per second, by status",
                    asks=[rate("holdfast_router_kv_events_total", P, "status", "{{status}}")],
                ),
                Panel(
                    title="Gap recovery", says="Gaps in the received KV events, by outcome of their recovery",
                    asks=[rate("holdfast_router_kv_recoveries_total", P, "outcome", "{{outcome}}")],
                ),
                Panel(
                    title="KV events lost", says="KV events of workers that the broker did not accept",
                    asks=[rate("holdfast_worker_kv_events_lost_total", W, "worker_id", "{{worker_id}}")],
                ),
            ],
        ),
        Row(
            title="Load",
            panels=[
                Panel(
                    title="Requests by worker", says="As workers count them",
                    asks=[Query(ask=f"sum by (worker_id) (dynamo_component_inflight_requests{{{W}}})", legend="{{worker_id}}")],
                    stacked=True,
                ),
                Panel(
                    title="Pending prompt tokens", says="Prompt tokens sent to a worker and not read yet, as frontends count",
                    asks=[Query(
                        ask=f"sum by (worker_id) (dynamo_frontend_worker_active_prefill_tokens{{{W}}})", legend="{{worker_id}}"
                    )],
                    stacked=True,
                ),
                Panel(
                    title="KV blocks in use", says="As workers report",
                    asks=[Query(
                        ask=f"max by (worker_id) (dynamo_frontend_worker_active_decode_blocks{{{W}}})", legend="{{worker_id}}"
                    )],
                ),
                Panel(
                    title="Waiting at workers", says="Requests that wait at a worker's DP ranks",
                    asks=[Query(
                        ask=f"max by (worker_id) (dynamo_frontend_worker_waiting_requests{{{W}}})", legend="{{worker_id}}"
                    )],
                ),
                Panel(
                    title="Imbalance", says="Token rate of the busiest worker, divided by the mean",
                    asks=[Query(
                        ask=f"max(sum by (worker_id) (rate(holdfast_worker_tokens_total{{{W}}}[$__rate_interval])))"
                        f" / avg(sum by (worker_id) (rate(holdfast_worker_tokens_total{{{W}}}[$__rate_interval])))",
                        legend="maximum / mean",
                    )],
                ),
                Panel(
                    title="Late event loops", says="Late ticks of a frontend's event loop, and workers that it found hung",
                    asks=[
                        Query(ask='sum by (process) (holdfast_late_ticks{process=~"$frontend"})', legend="late {{process}}"),
                        Query(ask='sum by (process) (holdfast_worker_hangs{process=~"$frontend"})', legend="hung {{process}}"),
                    ],
                ),
            ],
        ),
    ],
)  # fmt: skip
