"""What a frontend counts: the names of the seeds (`dynamo_frontend_*`), and our own (`holdfast_*`).

One table per question, in the order of a scrape. A new metric is one row here; `python tests/docs/metrics_page.py`
then writes it into docs/metrics.md.
"""

from prometheus_client import CollectorRegistry

from controller.frontend.metric_kinds import LabelledHistogram, log_spaced, token_histogram
from controller.metric_table import MetricTable, counter, gauge
from events.process.exposition import written

MIGRATION_S = log_spaced(0.001, 30, 15)
PROMPT_TOKENS = log_spaced(50, 128_000, 12)


class RequestCounts(MetricTable):
    """How many requests there are, and what became of the others."""

    ended = counter(
        "dynamo_frontend_requests",
        "Requests that have ended.",
        "model", "endpoint", "request_type", "status", "error_type",
    )  # fmt: skip
    active = gauge(
        "dynamo_frontend_active_requests", "Requests between their arrival and their end.", "model"
    )
    inflight = gauge("dynamo_frontend_inflight_requests", "Requests that are with a worker.", "model")
    queued = gauge("dynamo_frontend_queued_requests", "Requests that wait for a free worker.", "model")
    disconnected = gauge(
        "dynamo_frontend_disconnected_clients", "Clients that went before their answer ended."
    )
    output_tokens = counter("dynamo_frontend_output_tokens", "Tokens relayed to clients.", "model")
    cancellations = counter(
        "dynamo_frontend_model_cancellation",
        "Requests that their client gave up.",
        "model", "endpoint", "request_type",
    )  # fmt: skip
    rejections = counter(
        "dynamo_frontend_model_rejection", "Requests turned away for want of room.", "model", "endpoint"
    )
    refusals = counter(
        "holdfast_refused_requests",
        "Requests turned away for another reason than want of room, before anything was begun for them.",
        "model", "endpoint", "reason",
    )  # fmt: skip
    migrations = counter(
        "dynamo_frontend_model_migration",
        "Attempts that failed, whether or not another one was made: `ongoing_request` if they had brought tokens.",
        "model", "migration_type",
    )  # fmt: skip
    preempted = counter(
        "holdfast_preempted_requests",
        "Running answers that were put off for more urgent requests (`--park`).",
        "model", "tier",
    )  # fmt: skip
    over_cap = counter(
        "dynamo_frontend_model_migration_max_seq_len_exceeded",
        "Requests that could have migrated until they grew too long.",
        "model",
    )


class ModelSizes(MetricTable):
    """What a model's requests may take."""

    migration_limit = gauge(
        "dynamo_frontend_model_migration_limit", "Migrations allowed to a request.", "model"
    )
    context_length = gauge("dynamo_frontend_model_context_length", "Tokens of a model's context.", "model")
    total_kv_blocks = gauge(
        "dynamo_frontend_model_total_kv_blocks", "KV blocks of a model's worker.", "model"
    )
    max_num_seqs = gauge("dynamo_frontend_model_max_num_seqs", "Largest batch of a model's worker.", "model")
    kv_block_size = gauge("dynamo_frontend_model_kv_cache_block_size", "Tokens of a KV block.", "model")


RANK = ("worker_id", "dp_rank", "worker_type")  # the type: decode, for there are no prefill workers yet
WORKER_TYPE = "decode"


class WorkerGauges(MetricTable):
    """How each worker stands, as this frontend sees it."""

    waiting = gauge(
        "dynamo_frontend_worker_waiting_requests", "Requests that wait at a worker's DP rank.", *RANK
    )
    prefill_tokens = gauge(
        "dynamo_frontend_worker_active_prefill_tokens",
        "Prompt tokens that were sent there and are still to be read, as this frontend's router counts them.",
        *RANK,
    )
    decode_blocks = gauge("dynamo_frontend_worker_active_decode_blocks", "KV blocks in use.", *RANK)
    last_ttft = gauge(
        "dynamo_frontend_worker_last_time_to_first_token_seconds",
        "From the arrival of the last answer that began and ended at this worker to its first token.",
        "worker_id",
    )
    last_itl = gauge(
        "dynamo_frontend_worker_last_inter_token_latency_seconds",
        "Mean time between that answer's tokens.",
        "worker_id",
    )
    last_input = gauge(
        "dynamo_frontend_worker_last_input_sequence_tokens", "Tokens of that answer's prompt.", "worker_id"
    )


class RequestHistograms(MetricTable):
    """How long requests take, and how large they are."""

    duration = token_histogram(
        "dynamo_frontend_request_duration_seconds",
        "From arrival to end.",
        "model",
        bounds=log_spaced(1, 512, 10),
    )
    ttft = token_histogram(
        "dynamo_frontend_time_to_first_token_seconds",
        "From arrival to first token.",
        "model",
        bounds=log_spaced(0.001, 480, 18),
    )
    itl = token_histogram(
        "dynamo_frontend_inter_token_latency_seconds",
        "Between tokens.",
        "model",
        bounds=log_spaced(0.001, 2, 13),
    )
    input_tokens = token_histogram(
        "dynamo_frontend_input_sequence_tokens", "Tokens of a prompt.", "model", bounds=PROMPT_TOKENS
    )
    output_tokens = token_histogram(
        "dynamo_frontend_output_sequence_tokens",
        "Tokens of an answer.",
        "model",
        bounds=log_spaced(50, 32_000, 10),
    )
    cached_tokens = token_histogram(
        "dynamo_frontend_cached_tokens",
        "Prompt tokens found in a prefix cache.",
        "model",
        bounds=PROMPT_TOKENS,
    )
    tokenizer_ms = token_histogram(
        "dynamo_frontend_tokenizer_latency_ms",
        "Time to tokenise a prompt.",
        "operation",
        bounds=log_spaced(0.01, 1000, 16),
    )
    migration_s = token_histogram(
        "dynamo_frontend_model_migration_duration_seconds",
        "From the first failure's detection to the next token or the end, over all attempts.",
        "model", "migration_type", "outcome",
        bounds=MIGRATION_S,
    )  # fmt: skip
    resume = token_histogram(
        "holdfast_resume_seconds",
        "What a client saw: from its last token before a fault to the next.",
        "cause",
        bounds=MIGRATION_S,
    )
    queue_s = token_histogram(
        "holdfast_queue_wait_seconds",
        "How long requests waited for a free worker, and how that ended: `admitted`, `timeout`, `no_worker`, `gone`.",
        "model", "outcome",
        bounds=MIGRATION_S,
    )  # fmt: skip


class RouterMetrics(MetricTable):
    """What the router chose, and what it knows of the workers' KV caches."""

    decisions = counter(
        "holdfast_router_decisions", "Choices of a worker, by the mode that made them.", "model", "mode"
    )
    hit_rate = token_histogram(
        "holdfast_router_kv_hit_rate",
        "What share of a prompt's blocks the chosen worker has cached, as far as this frontend knows.",
        "model",
        bounds=tuple(n / 20 for n in range(21)),
    )
    overlap = token_histogram(
        "holdfast_router_overlap_blocks",
        "How many of a prompt's blocks those are.",
        "model",
        bounds=(0, *log_spaced(1, 8192, 14)),
    )
    kv_events = counter(
        "holdfast_router_kv_events",
        "KV events of workers, by how they went: `ok`, `parent_block_not_found`, `block_not_found`, `invalid_block`.",
        "event_type", "status",
    )  # fmt: skip
    kv_recoveries = counter(
        "holdfast_router_kv_recoveries",
        "`gap`: events were missing, `recovered`: they have come, `restored`: everything was told anew, `failed`: no answer.",
        "outcome",
    )
    kv_blocks = gauge("holdfast_router_kv_blocks", "Different KV blocks that workers say they hold.")
    kv_ranks = gauge(
        "holdfast_router_kv_ranks",
        "DP ranks that publish KV events: `complete`, or `incomplete` where something is being asked for.",
        "state",
    )
    kv_guessed = gauge(
        "holdfast_router_guessed_blocks",
        "KV blocks that are taken to be cached where workers do not say so.",
    )


class FaultMetrics(MetricTable):
    """What went wrong, and what this frontend does about it."""

    exposed = counter("holdfast_requests_exposed", "Requests that a convicted worker had fed.", "action")
    hangs = gauge("holdfast_worker_hangs", "Workers that this frontend has found hung.")
    stalled = counter(
        "holdfast_stalled_streams",
        "Streams that brought no token for too long although their worker went on.",
    )
    late_ticks = gauge("holdfast_late_ticks", "Times that this frontend's own loop was late.")
    late_chunks = gauge("holdfast_late_chunks", "Chunks of attempts that had been left, dropped.")
    slow_clients = counter("holdfast_slow_clients", "Clients cut off because they did not read.")
    parked = gauge("holdfast_parked_requests", "Requests that wait for a worker to go on with.")
    put_off = gauge("holdfast_put_off_requests", "Answers that are put off now, and go on later (`--park`).")
    breakers = gauge(
        "holdfast_local_breaker_state",
        "This frontend's own breaker: 0 closed, 1 open, 2 half-open.",
        "worker_id",
    )
    skipped = counter(
        "holdfast_journal_skipped",
        "Messages on the journal that are no events, and that this process has stepped over.",
    )
    panic = gauge("holdfast_panic", "1 while this frontend ignores its own breakers.", "model")


class BoundMetrics(MetricTable):
    """What was turned away before any work was done for it."""

    refused = counter(
        "holdfast_bound_refusals",
        "What was refused or ended at a bound, by the bound: `api_key`, `text_length`, `long_texts`, `long_text_wait`, "
        "`body_bytes`, `bodies_bytes`, `body_parse`, `body_values`, `body_wait`, `connections`, `connections_of_address`, "
        "`head_bytes`, `head_wait`.",
        "bound",
    )

    def count(self, bound: str) -> None:
        """Count a refusal."""
        self.refused.labels(bound).inc()


class FrontendMetrics:
    """Every metric of one frontend, in a registry of its own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = RequestCounts(registry)
        self.models = ModelSizes(registry)
        self.workers = WorkerGauges(registry)
        self.histograms = RequestHistograms(registry)
        self.router = RouterMetrics(registry)
        self.faults = FaultMetrics(registry)
        self.bounds = BoundMetrics(registry)
        self.shown: set[str] = set()  # workers of which something is shown
        self.shown_models: set[str] = set()
        self._settled = [*self.histograms.of_kind(LabelledHistogram), *self.router.of_kind(LabelledHistogram)]

    def keep(self, workers: set[str], models: set[str]) -> None:
        """Show no other workers and models: those that are gone would keep their last figures for ever."""
        for worker in self.shown - workers:
            self.workers.end(worker, "worker_id")
            self.faults.end(worker, "worker_id")
        self.shown &= workers
        for model in self.shown_models - models:
            self.models.end(model, "model")
            self.faults.end(model, "model")
            self.requests.inflight.remove(model)
            self.requests.queued.remove(model)
        self.shown_models &= models

    def settle(self) -> None:
        """Count what was noted since the last time: called ten times a second, so that it is never much."""
        for one in self._settled:
            one.settle()

    def render(self) -> bytes:
        """Return the exposition text."""
        return written(self.registry.collect())
