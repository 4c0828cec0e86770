"""Worker dashboard: state, canaries, work and KV cache moves of one or more workers."""

from grafana.boards.common import BREAKER, STATES, history, quantiles, rate
from grafana.model import WORKER, Dashboard, Panel, Query, Row

W = 'worker_id=~"$worker"'
RANK = "worker_id, dp_rank"


def each(
    metric: str, how: str = "max", labels: str = W, by: str = "worker_id", legend: str = "{{worker_id}}"
) -> Query:
    """Query a gauge per worker."""
    return Query(ask=f"{how} by ({by}) ({metric}{{{labels}}})", legend=legend)


STATE = Row(
    title="State",
    panels=[
        Panel(
            title="Health", says="State as decided by the controller", asks=[each("dynamo_worker_status")],
            kind="state-timeline", mappings=STATES, width=12,
        ),
        Panel(
            title="Breaker", says="The fleet's circuit breaker", asks=[each("dynamo_circuit_breaker_state")],
            kind="state-timeline", mappings=BREAKER, width=12,
        ),
        Panel(title="Weight", says="Weight in routing, 0 to 1", asks=[each("holdfast_worker_weight")], most=1.0, width=6),
        Panel(
            title="Local breakers", says="Number of frontends with an open or half-open local breaker",
            asks=[Query(ask=f"sum by (worker_id) (holdfast_local_breaker_state{{{W}}} > bool 0)", legend="{{worker_id}}")],
            width=6,
        ),
        Panel(
            title="Events", says="Decisions about the worker, and reports of its devices and engine",
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
            title="Failures", says="Failed probes, by reason",
            asks=[rate("dynamo_canary_failures_total", W, "worker_id, reason", "{{worker_id}} {{reason}}")],
        ),
        Panel(
            title="Probe duration", says="Time until a canary's answer is complete",
            asks=quantiles("dynamo_health_check_duration_seconds", W, by="worker_id"), unit="s",
        ),
        Panel(
            title="Canary cost", says="Device time used by canaries, per second",
            asks=[rate("holdfast_canary_gpu_seconds_total", W, "worker_id", "{{worker_id}}")], unit="s",
        ),
    ],
)  # fmt: skip

WORK = Row(
    title="Work",
    panels=[
        Panel(
            title="Tokens", says="Tokens per second",
            asks=[rate("holdfast_worker_tokens_total", W, "worker_id", "{{worker_id}}")],
        ),
        Panel(
            title="Requests", says="At the worker, waiting for its batch, in its engine, and queued",
            asks=[
                each("dynamo_component_inflight_requests", "sum", legend="at {{worker_id}}"),
                each("holdfast_worker_waiting_requests", "sum", legend="waiting {{worker_id}}"),
                each("dynamo_engine_request", "sum", legend="in its engine {{worker_id}}"),
                each("dynamo_request_queue", "sum", legend="queued {{worker_id}}"),
            ],
        ),
        Panel(
            title="Accepted, rejected, failed", says="Requests per second",
            asks=[
                rate("dynamo_component_requests_total", W, legend="accepted"),
                rate("dynamo_rejection_request_total", W, legend="rejected: full"),
                rate("dynamo_component_errors_total", W, "error_type", "{{error_type}}"),
                rate("dynamo_component_cancellation_total", W, legend="cancelled"),
            ],
        ),
        Panel(
            title="Request duration", says="From the arrival of a request to its end at this worker",
            asks=quantiles("dynamo_component_request_duration_seconds", W, by="worker_id"), unit="s",
        ),
        Panel(
            title="KV cache", says="Share of KV blocks in use",
            asks=[each("holdfast_worker_kv_used_ratio")], unit="percentunit", most=1.0,
        ),
        Panel(
            title="Prefix cache", says="Share of prompt tokens found in the prefix cache by the latest admitted requests",
            asks=[each("holdfast_worker_engine_gpu_prefix_cache_hit_rate", by=RANK, legend="{{worker_id}} {{dp_rank}}")],
            unit="percentunit", most=1.0,
        ),
        Panel(
            title="Batch", says="Decoding requests, requests in prefill, and waiting requests",
            asks=[
                each("holdfast_worker_engine_scheduled_num_decode_requests", "sum", legend="decoding {{worker_id}}"),
                each("holdfast_worker_engine_scheduled_num_prefill_requests", "sum", legend="prefill {{worker_id}}"),
                each("holdfast_worker_engine_num_requests_waiting", "sum", legend="waiting {{worker_id}}"),
            ],
        ),
        Panel(
            title="Step duration", says="Duration of the latest engine step",
            asks=[each("holdfast_worker_engine_wall_time", by=RANK, legend="{{worker_id}} {{dp_rank}}")], unit="s",
        ),
        Panel(
            title="Engine preemptions", says="Requests per second that returned to the queue because KV blocks ran out",
            asks=[Query(
                ask=f"sum by (worker_id) (deriv(holdfast_worker_engine_num_preemptions{{{W}}}[5m]))", legend="{{worker_id}}"
            )],
        ),
    ],
)  # fmt: skip

MOVES = Row(
    title="KV cache moves",
    panels=[
        Panel(
            title="Streams", says="Streams moved with their KV cache, by direction and outcome",
            asks=[rate("holdfast_worker_moves_total", W, "direction, outcome", "{{direction}} {{outcome}}")],
        ),
        Panel(
            title="Bytes", says="Bytes of KV cache of committed moves",
            asks=[rate("holdfast_worker_moved_bytes_total", W, "direction", "{{direction}}")], unit="Bps",
        ),
        Panel(
            title="Stop time", says="How long an incoming stream was stopped",
            asks=quantiles("holdfast_worker_move_stopped_seconds", W), unit="s",
        ),
        Panel(
            title="Moving streams", says="Streams that are moving in and out",
            asks=[
                each("holdfast_worker_moving_in", "sum", legend="in {{worker_id}}"),
                each("holdfast_worker_moving_out", "sum", legend="out {{worker_id}}"),
            ],
        ),
        Panel(
            title="Draining", says="1 while the worker drains", asks=[each("holdfast_worker_draining")],
        ),
        Panel(
            title="Upstream closed", says="Time without new requests, because the upstream sent Retry-After",
            asks=[each("holdfast_worker_upstream_closed_seconds")], unit="s",
        ),
        Panel(
            title="Refused connections", says="At a limit, and for lack of the fleet key",
            asks=[
                rate("holdfast_worker_connection_refusals_total", W, "bound", "{{bound}}"),
                rate("holdfast_worker_strangers_refused_total", W, legend="no fleet key"),
            ],
        ),
    ],
)  # fmt: skip

BOARD = Dashboard(
    uid="holdfast-worker", title="Worker", says="State, canaries, work and KV cache moves of one or more workers",
    rows=[STATE, CANARIES, WORK, MOVES], variables=[WORKER],
)  # fmt: skip
