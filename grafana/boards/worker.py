"""Worker dashboard: state, canaries, work and KV cache moves of one or more workers."""

from grafana.boards.common import BREAKER, STATES, history, quantiles, rate
from grafana.model import WORKER, Dashboard, Panel, Query, Row

W = 'worker_id=~"$worker"'
RANK = "worker_id, dp_rank"


def each(
    metric: str, how: str = "max", labels: str = W, by: str = "worker_id", legend: str = "{{worker_id}}"
) -> Query:
    """Query a gauge per worker."""
    return Query(f"{how} by ({by}) ({metric}{{{labels}}})", legend)


STATE = Row("State", [
    Panel("Health", "State as decided by the controller",
        [each("dynamo_worker_status")], kind="state-timeline", mappings=STATES, width=12),
    Panel("Breaker", "The fleet's circuit breaker",
        [each("dynamo_circuit_breaker_state")], kind="state-timeline", mappings=BREAKER, width=12),
    Panel("Weight", "Weight in routing, 0 to 1", [each("holdfast_worker_weight")], most=1.0, width=6),
    Panel("Local breakers", "Number of frontends with an open or half-open local breaker",
        [Query(f"sum by (worker_id) (holdfast_local_breaker_state{{{W}}} > bool 0)", "{{worker_id}}")], width=6),
    Panel("Events", "Decisions about the worker, and reports of its devices and engine", [
        history("""SELECT at, worker, kind, body->>'reason' AS reason, incident FROM holdfast.fleet_events
            WHERE worker IN (${worker:singlequote}) AND $__timeFilter(at) AND kind IN ('worker_joined', 'worker_left',
            'health_changed', 'breaker_opened', 'breaker_half_opened', 'breaker_closed', 'drain_started', 'drain_ended',
            'device_faulted', 'device_recovered', 'engine_faulted', 'worker_silent', 'worker_heard', 'spare_activated',
            'spare_released', 'canary_failed') ORDER BY at DESC LIMIT 200"""),
    ], kind="table", width=12),
])  # fmt: skip

CANARIES = Row("Canaries", [
    Panel("Failures", "Failed probes, by reason",
        [rate("dynamo_canary_failures_total", W, "worker_id, reason", "{{worker_id}} {{reason}}")]),
    Panel("Probe duration", "Time until a canary's answer is complete",
        quantiles("dynamo_health_check_duration_seconds", W, by="worker_id"), unit="s"),
    Panel("Canary cost", "Device time used by canaries, per second",
        [rate("holdfast_canary_gpu_seconds_total", W, "worker_id", "{{worker_id}}")], unit="s"),
])  # fmt: skip

WORK = Row("Work", [
    Panel("Tokens", "Tokens per second", [rate("holdfast_worker_tokens_total", W, "worker_id", "{{worker_id}}")]),
    Panel("Requests", "At the worker, waiting for its batch, in its engine, and queued", [
        each("dynamo_component_inflight_requests", "sum", legend="at {{worker_id}}"),
        each("holdfast_worker_waiting_requests", "sum", legend="waiting {{worker_id}}"),
        each("dynamo_engine_request", "sum", legend="in its engine {{worker_id}}"),
        each("dynamo_request_queue", "sum", legend="queued {{worker_id}}"),
    ]),
    Panel("Accepted, rejected, failed", "Requests per second", [
        rate("dynamo_component_requests_total", W, legend="accepted"),
        rate("dynamo_rejection_request_total", W, legend="rejected: full"),
        rate("dynamo_component_errors_total", W, "error_type", "{{error_type}}"),
        rate("dynamo_component_cancellation_total", W, legend="cancelled"),
    ]),
    Panel("Request duration", "From the arrival of a request to its end at this worker",
        quantiles("dynamo_component_request_duration_seconds", W, by="worker_id"), unit="s"),
    Panel("KV cache", "Share of KV blocks in use", [each("holdfast_worker_kv_used_ratio")], unit="percentunit", most=1.0),
    Panel("Prefix cache", "Share of prompt tokens found in the prefix cache by the latest admitted requests",
        [each("holdfast_worker_engine_gpu_prefix_cache_hit_rate", by=RANK, legend="{{worker_id}} {{dp_rank}}")],
        unit="percentunit", most=1.0),
    Panel("Batch", "Decoding requests, requests in prefill, and waiting requests", [
        each("holdfast_worker_engine_scheduled_num_decode_requests", "sum", legend="decoding {{worker_id}}"),
        each("holdfast_worker_engine_scheduled_num_prefill_requests", "sum", legend="prefill {{worker_id}}"),
        each("holdfast_worker_engine_num_requests_waiting", "sum", legend="waiting {{worker_id}}"),
    ]),
    Panel("Step duration", "Duration of the latest engine step",
        [each("holdfast_worker_engine_wall_time", by=RANK, legend="{{worker_id}} {{dp_rank}}")], unit="s"),
    Panel("Engine preemptions", "Requests per second that returned to the queue because KV blocks ran out",
        [Query(f"sum by (worker_id) (deriv(holdfast_worker_engine_num_preemptions{{{W}}}[5m]))", "{{worker_id}}")]),
])  # fmt: skip

MOVES = Row("KV cache moves", [
    Panel("Streams", "Streams moved with their KV cache, by direction and outcome",
        [rate("holdfast_worker_moves_total", W, "direction, outcome", "{{direction}} {{outcome}}")]),
    Panel("Bytes", "Bytes of KV cache of committed moves",
        [rate("holdfast_worker_moved_bytes_total", W, "direction", "{{direction}}")], unit="Bps"),
    Panel("Stop time", "How long an incoming stream was stopped",
        quantiles("holdfast_worker_move_stopped_seconds", W), unit="s"),
    Panel("Moving streams", "Streams that are moving in and out", [
        each("holdfast_worker_moving_in", "sum", legend="in {{worker_id}}"),
        each("holdfast_worker_moving_out", "sum", legend="out {{worker_id}}"),
    ]),
    Panel("Draining", "1 while the worker drains", [each("holdfast_worker_draining")]),
    Panel("Upstream closed", "Time without new requests, because the upstream sent Retry-After",
        [each("holdfast_worker_upstream_closed_seconds")], unit="s"),
    Panel("Refused connections", "At a limit, and for lack of the fleet key", [
        rate("holdfast_worker_connection_refusals_total", W, "bound", "{{bound}}"),
        rate("holdfast_worker_strangers_refused_total", W, legend="no fleet key"),
    ]),
])  # fmt: skip

BOARD = Dashboard("holdfast-worker", "Worker", "State, canaries, work and KV cache moves of one or more workers",
    variables=[WORKER], rows=[STATE, CANARIES, WORK, MOVES])  # fmt: skip
