"""Router: are requests where their prefixes are, and is the load even?"""

from grafana.boards.common import quantiles, rate
from grafana.model import FRONTEND, MODEL, WORKER, Dashboard, Panel, Query, Row

F = 'model=~"$model",process=~"$frontend"'
P = 'process=~"$frontend"'
W = 'worker_id=~"$worker"'

BOARD = Dashboard(
    uid="holdfast-router",
    title="Router",
    says="Are requests where their prefixes are, and is the load even?",
    variables=[MODEL, FRONTEND, WORKER],
    rows=[
        Row(
            title="Prefixes",
            panels=[
                Panel(
                    title="Hit rate", says="What share of a prompt's blocks the chosen worker has cached",
                    asks=[Query(
                        ask=f"sum(rate(holdfast_router_kv_hit_rate_sum{{{F}}}[$__rate_interval]))"
                        f" / sum(rate(holdfast_router_kv_hit_rate_count{{{F}}}[$__rate_interval]))",
                        legend="mean",
                    )],
                    unit="percentunit", most=1.0,
                ),
                Panel(
                    title="Blocks found", says="How many blocks those are",
                    asks=quantiles("holdfast_router_overlap_blocks", F),
                ),
                Panel(
                    title="Tokens found", says="Prompt tokens that were found in a prefix cache",
                    asks=quantiles("dynamo_frontend_cached_tokens", F),
                ),
                Panel(
                    title="Choices", says="Choices of a worker, by the mode that made them",
                    asks=[rate("holdfast_router_decisions_total", F, "mode", "{{mode}}")],
                ),
                Panel(
                    title="The index", says="KV blocks that workers say they hold, and those that are guessed",
                    asks=[
                        Query(ask=f"max by (process) (holdfast_router_kv_blocks{{{P}}})", legend="told {{process}}"),
                        Query(ask=f"max by (process) (holdfast_router_guessed_blocks{{{P}}})", legend="guessed {{process}}"),
                    ],
                ),
                Panel(
                    title="Ranks", says="DP ranks that publish KV events, and those of which something is missing",
                    asks=[Query(ask='max by (state) (holdfast_router_kv_ranks{process=~"$frontend"})', legend="{{state}}")],
                ),
                Panel(
                    title="KV events", says="By how they went, in a second",
                    asks=[rate("holdfast_router_kv_events_total", P, "status", "{{status}}")],
                ),
                Panel(
                    title="Lost and recovered", says="Gaps in what was heard, and how they were closed",
                    asks=[rate("holdfast_router_kv_recoveries_total", P, "outcome", "{{outcome}}")],
                ),
                Panel(
                    title="Lost on the way", says="KV events that the broker did not take from workers",
                    asks=[rate("holdfast_worker_kv_events_lost_total", W, "worker_id", "{{worker_id}}")],
                ),
            ],
        ),
        Row(
            title="Load",
            panels=[
                Panel(
                    title="Requests with each worker", says="As workers count them",
                    asks=[Query(ask=f"sum by (worker_id) (dynamo_component_inflight_requests{{{W}}})", legend="{{worker_id}}")],
                    stacked=True,
                ),
                Panel(
                    title="Prompt tokens to be read", says="Sent there and still to be read, as frontends count",
                    asks=[Query(
                        ask=f"sum by (worker_id) (dynamo_frontend_worker_active_prefill_tokens{{{W}}})", legend="{{worker_id}}"
                    )],
                    stacked=True,
                ),
                Panel(
                    title="KV blocks in use", says="By workers' own reports",
                    asks=[Query(
                        ask=f"max by (worker_id) (dynamo_frontend_worker_active_decode_blocks{{{W}}})", legend="{{worker_id}}"
                    )],
                ),
                Panel(
                    title="Waiting at workers", says="Requests that wait at a worker's DP rank",
                    asks=[Query(
                        ask=f"max by (worker_id) (dynamo_frontend_worker_waiting_requests{{{W}}})", legend="{{worker_id}}"
                    )],
                ),
                Panel(
                    title="Evenness", says="Tokens that the busiest worker says, over the mean of all",
                    asks=[Query(
                        ask=f"max(sum by (worker_id) (rate(holdfast_worker_tokens_total{{{W}}}[$__rate_interval])))"
                        f" / avg(sum by (worker_id) (rate(holdfast_worker_tokens_total{{{W}}}[$__rate_interval])))",
                        legend="most, over the mean",
                    )],
                ),
                Panel(
                    title="Late loops", says="Times that a frontend's own loop was late, and workers that it found hung",
                    asks=[
                        Query(ask='sum by (process) (holdfast_late_ticks{process=~"$frontend"})', legend="late {{process}}"),
                        Query(ask='sum by (process) (holdfast_worker_hangs{process=~"$frontend"})', legend="hung {{process}}"),
                    ],
                ),
            ],
        ),
    ],
)  # fmt: skip
