"""Worker: how one worker, or a few, have fared."""

from grafana.boards.common import BREAKER, STATES, history, quantiles, rate
from grafana.model import WORKER, Dashboard, Panel, Query, Row

W = 'worker_id=~"$worker"'
RANK = "worker_id, dp_rank"


def each(
    metric: str, how: str = "max", labels: str = W, by: str = "worker_id", legend: str = "{{worker_id}}"
) -> Query:
    """Ask for a gauge of each worker."""
    return Query(ask=f"{how} by ({by}) ({metric}{{{labels}}})", legend=legend)


STATE = Row(
    title="State",
    panels=[
        Panel(
            title="Health", says="What the fleet has decided", asks=[each("dynamo_worker_status")],
            kind="state-timeline", mappings=STATES, width=12,
        ),
        Panel(
            title="Breaker", says="The fleet's circuit breaker", asks=[each("dynamo_circuit_breaker_state")],
            kind="state-timeline", mappings=BREAKER, width=12,
        ),
        Panel(title="Weight", says="Its share of the traffic, 0 to 1", asks=[each("holdfast_worker_weight")], most=1.0, width=6),
        Panel(
            title="Frontends' own breakers", says="At how many frontends it is not closed",
            asks=[Query(ask=f"sum by (worker_id) (holdfast_local_breaker_state{{{W}}} > bool 0)", legend="{{worker_id}}")],
            width=6,
        ),
        Panel(
            title="What happened", says="What was decided about it, and what its devices and engine have said",
            asks=[history("""SELECT at, worker, kind, body->>'reason' AS reason, incident FROM holdfast.fleet_events
                WHERE worker IN (${worker:singlequote}) AND $__timeFilter(at) AND kind IN ('worker_joined', 'worker_left',
                'health_changed', 'breaker_opened', 'breaker_half_opened', 'breaker_closed', 'drain_started', 'drain_ended',
                'device_faulted', 'device_recovered', 'engine_faulted', 'worker_silent', 'worker_heard', 'spare_activated',
                'spare_released', 'canary_failed') ORDER BY at DESC LIMIT 200""")],
            kind="table", width=12,
        ),
    ],
)  # fmt: skip

CANARIES = Row(
    title="Canaries",
    panels=[
        Panel(
            title="Failures", says="Probes that found something wrong, by what",
            asks=[rate("dynamo_canary_failures_total", W, "worker_id, reason", "{{worker_id}} {{reason}}")],
        ),
        Panel(
            title="A probe takes", says="Until a canary's answer is complete",
            asks=quantiles("dynamo_health_check_duration_seconds", W, by="worker_id"), unit="s",
        ),
        Panel(
            title="What they cost", says="Device time taken by canaries, in a second",
            asks=[rate("holdfast_canary_gpu_seconds_total", W, "worker_id", "{{worker_id}}")], unit="s",
        ),
    ],
)  # fmt: skip

WORK = Row(
    title="Work",
    panels=[
        Panel(
            title="Tokens", says="Tokens a second", asks=[rate("holdfast_worker_tokens_total", W, "worker_id", "{{worker_id}}")],
        ),
        Panel(
            title="Requests", says="With it, waiting for its batch, and at its own bound",
            asks=[
                each("dynamo_component_inflight_requests", "sum", legend="with {{worker_id}}"),
                each("holdfast_worker_waiting_requests", "sum", legend="waiting {{worker_id}}"),
                each("dynamo_engine_request", "sum", legend="in its engine {{worker_id}}"),
                each("dynamo_request_queue", "sum", legend="queued {{worker_id}}"),
            ],
        ),
        Panel(
            title="Requests taken, refused, failed", says="In a second",
            asks=[
                rate("dynamo_component_requests_total", W, legend="taken"),
                rate("dynamo_rejection_request_total", W, legend="refused: it was full"),
                rate("dynamo_component_errors_total", W, "error_type", "{{error_type}}"),
                rate("dynamo_component_cancellation_total", W, legend="cancelled"),
            ],
        ),
        Panel(
            title="A request takes", says="From a request to its end at this worker",
            asks=quantiles("dynamo_component_request_duration_seconds", W, by="worker_id"), unit="s",
        ),
        Panel(
            title="KV cache", says="KV blocks in use, of all",
            asks=[each("holdfast_worker_kv_used_ratio")], unit="percentunit", most=1.0,
        ),
        Panel(
            title="Prefix cache", says="Prompt tokens found in the prefix cache by the requests admitted last",
            asks=[each("holdfast_worker_engine_gpu_prefix_cache_hit_rate", by=RANK, legend="{{worker_id}} {{dp_rank}}")],
            unit="percentunit", most=1.0,
        ),
        Panel(
            title="Batch", says="Requests that get a token, prompts that are read, and those that wait",
            asks=[
                each("holdfast_worker_engine_scheduled_num_decode_requests", "sum", legend="decoding {{worker_id}}"),
                each("holdfast_worker_engine_scheduled_num_prefill_requests", "sum", legend="read {{worker_id}}"),
                each("holdfast_worker_engine_num_requests_waiting", "sum", legend="waiting {{worker_id}}"),
            ],
        ),
        Panel(
            title="A pass takes", says="Seconds that the newest pass takes",
            asks=[each("holdfast_worker_engine_wall_time", by=RANK, legend="{{worker_id}} {{dp_rank}}")], unit="s",
        ),
        Panel(
            title="Sent back to wait", says="Requests that went back to waiting because KV blocks ran out, in a second",
            asks=[Query(
                ask=f"sum by (worker_id) (deriv(holdfast_worker_engine_num_preemptions{{{W}}}[5m]))", legend="{{worker_id}}"
            )],
        ),
    ],
)  # fmt: skip

MOVES = Row(
    title="Moves with the KV cache",
    panels=[
        Panel(
            title="Streams", says="Streams that moved with their KV cache, or were to, by what came of it",
            asks=[rate("holdfast_worker_moves_total", W, "direction, outcome", "{{direction}} {{outcome}}")],
        ),
        Panel(
            title="Bytes", says="Bytes of KV cache of committed moves",
            asks=[rate("holdfast_worker_moved_bytes_total", W, "direction", "{{direction}}")], unit="Bps",
        ),
        Panel(
            title="Stopped for", says="How long a stream that came had stopped",
            asks=quantiles("holdfast_worker_move_stopped_seconds", W), unit="s",
        ),
        Panel(
            title="On their way", says="Streams on their way in and out",
            asks=[
                each("holdfast_worker_moving_in", "sum", legend="in {{worker_id}}"),
                each("holdfast_worker_moving_out", "sum", legend="out {{worker_id}}"),
            ],
        ),
        Panel(
            title="Takes nothing new", says="1 while it drains", asks=[each("holdfast_worker_draining")],
        ),
        Panel(
            title="Upstream closed", says="Seconds for which it takes no new requests: its upstream said when to retry",
            asks=[each("holdfast_worker_upstream_closed_seconds")], unit="s",
        ),
        Panel(
            title="Refused connections", says="At a bound, and of those who did not know the fleet's key",
            asks=[
                rate("holdfast_worker_connection_refusals_total", W, "bound", "{{bound}}"),
                rate("holdfast_worker_strangers_refused_total", W, legend="strangers"),
            ],
        ),
    ],
)  # fmt: skip

BOARD = Dashboard(
    uid="holdfast-worker", title="Worker", says="How one worker, or a few, have fared",
    rows=[STATE, CANARIES, WORK, MOVES], variables=[WORKER],
)  # fmt: skip
