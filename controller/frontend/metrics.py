"""The metrics of a frontend, under Dynamo's names (`dynamo_frontend_*`) and Holdfast's (`holdfast_*`).

Each subject has one `MetricTable` in this module. A scrape returns the tables in the order of their classes.
To add a metric, add a row to a table. `python tests/docs/metrics_page.py` then writes the metric into
docs/reference/metrics.md.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from controller.metric_table import MetricTable, Row, counter, gauge
from events.process.exposition import written


def log_spaced(first: float, last: float, count: int) -> tuple[float, ...]:
    """Return `count` bounds from `first` to `last`, evenly spaced on a log scale, with two significant digits."""
    ratio = (last / first) ** (1 / (count - 1))
    return tuple(float(f"{first * ratio**place:.2g}") for place in range(count))


class Buckets:
    """The histogram of one label set, fast enough for the token path.

    It consists of plain lists and numbers, and is rendered only at a scrape. `prometheus_client` takes as long to
    observe one value as the frontend takes to relay a token. Here `note` only appends a value to a list of pending
    values. `settle` sorts the pending values into the buckets, ten times a second and at each scrape. A caller on the
    token path keeps the Buckets object of its labels, which saves a dictionary lookup.
    """

    __slots__ = ("_bounds", "counts", "note", "noted", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.noted: list[float] = []  # values that are not counted yet
        self.note = self.noted.append
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value directly to its bucket, `times` times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def settle(self) -> None:
        """Sort the pending values into the buckets, and clear the list of pending values."""
        noted, counts = self.noted, self.counts
        if not noted:
            return
        for index, count in Counter(map(bisect_left, repeat(self._bounds), noted)).items():
            counts[index] += count
        self.total = sum(noted, self.total)
        noted.clear()

    def rows(self) -> list[tuple[str, float]]:
        """Return, for each bucket, its upper bound and the number of values that do not exceed the bound."""
        bounds = (*map(str, self._bounds), "+Inf")
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


class LabelledHistogram(Collector):
    """A histogram with labels: one Buckets object per label set."""

    def __init__(self, row: "Row[LabelledHistogram]") -> None:
        self._row = row
        self._by: dict[tuple[str, ...], Buckets] = defaultdict(lambda: Buckets(row.bounds))

    def of(self, *labels: str) -> Buckets:
        """Return the buckets of one label set.

        The caller should keep them, because each call costs a dictionary lookup.
        """
        return self._by[labels]

    def settle(self) -> None:
        """Sort the pending values of all label sets into their buckets."""
        for buckets in self._by.values():
            buckets.settle()

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._row.name, self._row.text, labels=self._row.labels)
        self.settle()
        for labels, buckets in self._by.items():
            family.add_metric(labels, buckets=buckets.rows(), sum_value=buckets.total)
        yield family


def token_histogram(name: str, text: str, *labels: str, bounds: Sequence[float]) -> Row[LabelledHistogram]:
    """Declare a histogram with these labels. `bounds` are the upper bounds of the buckets."""
    return Row(name, text, labels, LabelledHistogram, tuple(bounds))


MIGRATION_S = log_spaced(0.001, 30, 15)
PROMPT_TOKENS = log_spaced(50, 128_000, 12)


class RequestCounts(MetricTable):
    """Counters and gauges of active, queued, ended, rejected, migrated and preempted requests."""

    ended = counter(
        "dynamo_frontend_requests",
        "Requests that have ended.",
        "model", "endpoint", "request_type", "status", "error_type",
    )  # fmt: skip
    active = gauge("dynamo_frontend_active_requests", "Requests that have arrived and not ended.", "model")
    inflight = gauge("dynamo_frontend_inflight_requests", "Requests dispatched to a worker.", "model")
    queued = gauge("dynamo_frontend_queued_requests", "Requests waiting for a free worker.", "model")
    disconnected = gauge(
        "dynamo_frontend_disconnected_clients", "Clients that disconnected before their answer ended."
    )
    output_tokens = counter("dynamo_frontend_output_tokens", "Tokens relayed to clients.", "model")
    cancellations = counter(
        "dynamo_frontend_model_cancellation",
        "Requests cancelled by their client.",
        "model", "endpoint", "request_type",
    )  # fmt: skip
    rejections = counter(
        "dynamo_frontend_model_rejection", "Requests rejected for lack of room.", "model", "endpoint"
    )
    refusals = counter(
        "holdfast_refused_requests",
        "Requests rejected before any work was done for them, for a reason other than lack of room.",
        "model", "endpoint", "reason",
    )  # fmt: skip
    migrations = counter(
        "dynamo_frontend_model_migration",
        "Failed attempts, whether or not they were retried: `ongoing_request` if they had produced tokens.",
        "model", "migration_type",
    )  # fmt: skip
    preempted = counter(
        "holdfast_preempted_requests",
        "Running answers preempted by more urgent requests (`--park`).",
        "model", "tier",
    )  # fmt: skip
    over_cap = counter(
        "dynamo_frontend_model_migration_max_seq_len_exceeded",
        "Requests that became too long to migrate.",
        "model",
    )


class ModelSizes(MetricTable):
    """Gauges of each model: migration limit, context length, KV blocks, tokens per KV block and batch size."""

    migration_limit = gauge(
        "dynamo_frontend_model_migration_limit", "Migrations allowed per request.", "model"
    )
    context_length = gauge(
        "dynamo_frontend_model_context_length", "Context length of a model, in tokens.", "model"
    )
    total_kv_blocks = gauge(
        "dynamo_frontend_model_total_kv_blocks", "KV blocks of one worker of the model.", "model"
    )
    max_num_seqs = gauge(
        "dynamo_frontend_model_max_num_seqs", "Maximum batch size of one worker of the model.", "model"
    )
    kv_block_size = gauge("dynamo_frontend_model_kv_cache_block_size", "Tokens per KV block.", "model")


# The worker type is always decode, because there are no prefill workers yet.
RANK = ("worker_id", "dp_rank", "worker_type")
WORKER_TYPE = "decode"


class WorkerGauges(MetricTable):
    """The load and the most recent latencies of each worker, as this frontend sees them."""

    waiting = gauge(
        "dynamo_frontend_worker_waiting_requests", "Requests waiting at a worker's DP rank.", *RANK
    )
    prefill_tokens = gauge(
        "dynamo_frontend_worker_active_prefill_tokens",
        "Prompt tokens sent to a worker and not prefilled yet, as this frontend's router counts them.",
        *RANK,
    )
    decode_blocks = gauge("dynamo_frontend_worker_active_decode_blocks", "KV blocks in use.", *RANK)
    last_ttft = gauge(
        "dynamo_frontend_worker_last_time_to_first_token_seconds",
        "Seconds from arrival to first token of the last answer that began and ended at this worker.",
        "worker_id",
    )
    last_itl = gauge(
        "dynamo_frontend_worker_last_inter_token_latency_seconds",
        "Mean seconds between the tokens of that answer.",
        "worker_id",
    )
    last_input = gauge(
        "dynamo_frontend_worker_last_input_sequence_tokens", "Prompt tokens of that answer.", "worker_id"
    )


class RequestHistograms(MetricTable):
    """Durations and sizes of requests."""

    duration = token_histogram(
        "dynamo_frontend_request_duration_seconds",
        "Seconds from the arrival of a request to its end.",
        "model",
        bounds=log_spaced(1, 512, 10),
    )
    ttft = token_histogram(
        "dynamo_frontend_time_to_first_token_seconds",
        "Seconds from the arrival of a request to its first token.",
        "model",
        bounds=log_spaced(0.001, 480, 18),
    )
    itl = token_histogram(
        "dynamo_frontend_inter_token_latency_seconds",
        "Seconds between two tokens of an answer.",
        "model",
        bounds=log_spaced(0.001, 2, 13),
    )
    input_tokens = token_histogram(
        "dynamo_frontend_input_sequence_tokens", "Tokens per prompt.", "model", bounds=PROMPT_TOKENS
    )
    output_tokens = token_histogram(
        "dynamo_frontend_output_sequence_tokens",
        "Tokens per answer.",
        "model",
        bounds=log_spaced(50, 32_000, 10),
    )
    cached_tokens = token_histogram(
        "dynamo_frontend_cached_tokens",
        "Prompt tokens found in a prefix cache, per request.",
        "model",
        bounds=PROMPT_TOKENS,
    )
    tokenizer_ms = token_histogram(
        "dynamo_frontend_tokenizer_latency_ms",
        "Milliseconds to tokenize a prompt.",
        "operation",
        bounds=log_spaced(0.01, 1000, 16),
    )
    migration_s = token_histogram(
        "dynamo_frontend_model_migration_duration_seconds",
        "Seconds from the detection of the first failure to the next token or the end, over all attempts.",
        "model", "migration_type", "outcome",
        bounds=MIGRATION_S,
    )  # fmt: skip
    resume = token_histogram(
        "holdfast_resume_seconds",
        "Seconds from a client's last token before a fault to its next token.",
        "cause",
        bounds=MIGRATION_S,
    )
    queue_s = token_histogram(
        "holdfast_queue_wait_seconds",
        "Seconds that requests waited for a free worker, by outcome: `admitted`, `timeout`, `no_worker`, `gone`.",
        "model", "outcome",
        bounds=MIGRATION_S,
    )  # fmt: skip


class RouterMetrics(MetricTable):
    """The router's choices, and its view of the workers' KV caches."""

    decisions = counter(
        "holdfast_router_decisions", "Workers chosen for a request, by router mode.", "model", "mode"
    )
    hit_rate = token_histogram(
        "holdfast_router_kv_hit_rate",
        "Share of a prompt's blocks that the chosen worker has cached, as far as this frontend knows.",
        "model",
        bounds=tuple(n / 20 for n in range(21)),
    )
    overlap = token_histogram(
        "holdfast_router_overlap_blocks",
        "Number of a prompt's blocks that the chosen worker has cached, as far as this frontend knows.",
        "model",
        bounds=(0, *log_spaced(1, 8192, 14)),
    )
    kv_events = counter(
        "holdfast_router_kv_events",
        "KV events of workers, by result: `ok`, `parent_block_not_found`, `block_not_found`, `invalid_block`.",
        "event_type", "status",
    )  # fmt: skip
    kv_recoveries = counter(
        "holdfast_router_kv_recoveries",
        "Recoveries of KV events: `gap`: events missing, `recovered`: received later, `restored`: full resync, `failed`: no "
        "reply.",
        "outcome",
    )
    kv_blocks = gauge("holdfast_router_kv_blocks", "Distinct KV blocks that workers report as cached.")
    kv_ranks = gauge(
        "holdfast_router_kv_ranks",
        "DP ranks that publish KV events: `complete`, or `incomplete` while missing events are being requested.",
        "state",
    )
    kv_guessed = gauge(
        "holdfast_router_guessed_blocks",
        "KV blocks assumed to be cached at workers that do not report them.",
    )


class FaultMetrics(MetricTable):
    """Faults, and this frontend's reactions to them."""

    exposed = counter(
        "holdfast_requests_exposed", "Requests that received tokens from a worker convicted later.", "action"
    )
    hangs = gauge("holdfast_worker_hangs", "Hung workers that this frontend has detected.")
    stalled = counter(
        "holdfast_stalled_streams",
        "Streams that produced no token for too long although their worker was running.",
    )
    late_ticks = gauge("holdfast_late_ticks", "Times that this frontend's event loop was late.")
    late_chunks = gauge("holdfast_late_chunks", "Chunks dropped because their attempt had been left.")
    slow_clients = counter(
        "holdfast_slow_clients", "Clients disconnected because they did not read their stream."
    )
    parked = gauge("holdfast_parked_requests", "Interrupted requests waiting for a worker to continue on.")
    put_off = gauge("holdfast_put_off_requests", "Preempted answers waiting to be resumed (`--park`).")
    breakers = gauge(
        "holdfast_local_breaker_state",
        "This frontend's local breaker of a worker: 0 closed, 1 open, 2 half-open.",
        "worker_id",
    )
    skipped = counter(
        "holdfast_journal_skipped",
        "Journal messages that are not valid events and were skipped by this process.",
    )
    panic = gauge("holdfast_panic", "1 while this frontend ignores its own breakers.", "model")


class BoundMetrics(MetricTable):
    """Requests and connections refused at a limit, before any work was done for them."""

    refused = counter(
        "holdfast_bound_refusals",
        "Requests and connections refused or closed at a limit, by the name of the limit.",
        "bound",
    )

    def count(self, bound: str) -> None:
        """Count a request or connection that was refused at this limit."""
        self.refused.labels(bound).inc()


class StoredResponseMetrics(MetricTable):
    """The stored responses of the Responses API."""

    number = gauge("holdfast_stored_responses", "Responses that this frontend keeps for later requests.")
    bytes = gauge("holdfast_stored_response_bytes", "Bytes of these responses and their conversations.")
    dropped = counter(
        "holdfast_stored_responses_dropped",
        "Stored responses dropped at a limit: number, bytes or age.",
        "why",
    )


class FrontendMetrics:
    """All metrics of one frontend, in their own registry."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = RequestCounts(registry)
        self.models = ModelSizes(registry)
        self.workers = WorkerGauges(registry)
        self.histograms = RequestHistograms(registry)
        self.router = RouterMetrics(registry)
        self.faults = FaultMetrics(registry)
        self.bounds = BoundMetrics(registry)
        self.stored_responses = StoredResponseMetrics(registry)
        self.shown: set[str] = set()  # workers for which a series exists
        self.shown_models: set[str] = set()
        self._settled = [*self.histograms.of_kind(LabelledHistogram), *self.router.of_kind(LabelledHistogram)]

    def keep(self, workers: set[str], models: set[str]) -> None:
        """Keep only the series of these workers and models, and remove all others.

        Without this, later scrapes would still contain the last values of workers and models that have left.
        """
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
        """Sort the values recorded since the last call into the buckets of their histograms.

        Called ten times a second, so few values are pending.
        """
        for one in self._settled:
            one.settle()

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return written(self.registry.collect())
