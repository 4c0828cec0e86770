"""What a frontend counts: the names of the seeds (`dynamo_frontend_*`), and our own (`holdfast_*`).

Histograms on the token path are plain lists of counts, filled once per turn and stream, and rendered only
when they are asked for: `prometheus_client` observes one value in the time in which we relay a token. What is
counted with each request is a plain number in the same way.
"""

from bisect import bisect_left
from collections import Counter as Counted
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

PREFIX = "dynamo_frontend_"


def log_spaced(first: float, last: float, count: int) -> tuple[float, ...]:
    """Return `count` bounds from `first` to `last`, evenly spaced in their logarithm, with two significant digits."""
    ratio = (last / first) ** (1 / (count - 1))
    return tuple(float(f"{first * ratio**place:.2g}") for place in range(count))


class Buckets:
    """One histogram of one label set. What is noted is counted when somebody looks, and with each `settle`."""

    __slots__ = ("_bounds", "_noted", "counts", "note", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._noted: list[float] = []
        self.note: Callable[[float], None] = self._noted.append
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, or the same value several times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def settle(self) -> None:
        """Count what was noted."""
        noted, counts = self._noted, self.counts
        if not noted:
            return
        for place, count in Counted(map(bisect_left, repeat(self._bounds), noted)).items():
            counts[place] += count
        self.total = sum(noted, self.total)
        noted.clear()

    def rows(self) -> list[tuple[str, float]]:
        """Return the cumulative counts, by upper bound."""
        out, running = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self.counts, strict=True):
            running += count
            out.append((bound, float(running)))
        return out


class Histogram(Collector):
    """A histogram by labels."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]) -> None:
        self._name, self._text, self._bounds, self._labels = name, text, tuple(bounds), tuple(labels)
        self._by: dict[tuple[str, ...], Buckets] = {}

    def of(self, *labels: str) -> Buckets:
        """Return the buckets of one label set. Keep them: this is a look-up."""
        found = self._by.get(labels)
        if found is None:
            found = self._by[labels] = Buckets(self._bounds)
        return found

    def settle(self) -> None:
        """Count what was noted, of all label sets."""
        for buckets in self._by.values():
            buckets.settle()

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        self.settle()
        for labels, buckets in self._by.items():
            family.add_metric(labels, buckets=buckets.rows(), sum_value=buckets.total)
        yield family


class Count(Collector):
    """A counter or a gauge by labels, for what changes with each request."""

    def __init__(
        self,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str],
    ) -> None:
        self._family, self._name, self._text, self._labels = family, name, text, tuple(labels)
        self._by: dict[tuple[str, ...], int] = {}

    def add(self, count: int, *labels: str) -> None:
        """Add so much to one label set's."""
        self._by[labels] = self._by.get(labels, 0) + count

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        family = self._family(self._name, self._text, labels=self._labels)
        for labels, count in self._by.items():
            family.add_metric(labels, count)
        yield family


class FrontendMetrics:
    """Every metric of one frontend, in a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # names that nobody asked for
        registry = self.registry = CollectorRegistry()
        self.shown: set[str] = set()  # workers of which something is shown
        self._of_workers: list[Gauge] = []
        self._histograms: list[Histogram] = []

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def worker_gauge(name: str, text: str) -> Gauge:
            self._of_workers.append(gauge(name, text, "worker_id"))
            return self._of_workers[-1]

        def histogram(name: str, text: str, bounds: Sequence[float], *labels: str) -> Histogram:
            made = Histogram(name, text, bounds, labels)
            registry.register(made)
            self._histograms.append(made)
            return made

        def count(
            family: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, text: str, *labels: str
        ) -> Count:
            made = Count(family, name, text, labels)
            registry.register(made)
            return made

        ends = ("model", "endpoint", "request_type", "status", "error_type")
        self.requests = count(CounterMetricFamily, f"{PREFIX}requests", "Requests that have ended.", *ends)
        self.active = count(
            GaugeMetricFamily,
            f"{PREFIX}active_requests",
            "Requests between their arrival and their end.",
            "model",
        )
        self.inflight = gauge(f"{PREFIX}inflight_requests", "Requests that are with a worker.", "model")
        self.queued = gauge(f"{PREFIX}queued_requests", "Requests that wait for a free worker.", "model")
        self.disconnected = gauge(
            f"{PREFIX}disconnected_clients", "Clients that went before their answer ended."
        )
        self.output_tokens = counter(f"{PREFIX}output_tokens", "Tokens relayed to clients.", "model")
        self.cancellations = counter(
            f"{PREFIX}model_cancellation",
            "Requests that their client gave up.",
            "model",
            "endpoint",
            "request_type",
        )
        self.rejections = counter(f"{PREFIX}model_rejection", "Requests turned away.", "model", "endpoint")
        self.migrations = counter(
            f"{PREFIX}model_migration",
            "Attempts that failed, whether or not another one was made: `ongoing_request` if they had brought tokens.",
            "model",
            "migration_type",
        )
        self.over_cap = counter(
            f"{PREFIX}model_migration_max_seq_len_exceeded",
            "Requests that could have migrated until they grew too long.",
            "model",
        )
        self.migration_limit = gauge(
            f"{PREFIX}model_migration_limit", "Migrations allowed to a request.", "model"
        )
        self.context_length = gauge(f"{PREFIX}model_context_length", "Tokens of a model's context.", "model")
        self.total_kv_blocks = gauge(
            f"{PREFIX}model_total_kv_blocks", "KV blocks of a model's worker.", "model"
        )
        self.max_num_seqs = gauge(
            f"{PREFIX}model_max_num_seqs", "Largest batch of a model's worker.", "model"
        )
        self.kv_block_size = gauge(f"{PREFIX}model_kv_cache_block_size", "Tokens of a KV block.", "model")
        self.waiting = worker_gauge(f"{PREFIX}worker_waiting_requests", "Requests that wait at a worker.")
        self.prefill_tokens = worker_gauge(
            f"{PREFIX}worker_active_prefill_tokens",
            "Prompt tokens that were sent there and are still to be read, as this frontend's router counts them.",
        )
        self.decode_blocks = worker_gauge(f"{PREFIX}worker_active_decode_blocks", "KV blocks in use.")
        last = f"{PREFIX}worker_last_"
        self.last_ttft = worker_gauge(
            f"{last}time_to_first_token_seconds",
            "From the arrival of the last answer that began and ended at this worker to its first token.",
        )
        self.last_itl = worker_gauge(
            f"{last}inter_token_latency_seconds", "Mean time between that answer's tokens."
        )
        self.last_input = worker_gauge(f"{last}input_sequence_tokens", "Tokens of that answer's prompt.")
        self.duration = histogram(
            f"{PREFIX}request_duration_seconds", "From arrival to end.", log_spaced(1, 512, 10), "model"
        )
        self.ttft = histogram(
            f"{PREFIX}time_to_first_token_seconds",
            "From arrival to first token.",
            log_spaced(0.001, 480, 18),
            "model",
        )
        self.itl = histogram(
            f"{PREFIX}inter_token_latency_seconds", "Between tokens.", log_spaced(0.001, 2, 13), "model"
        )
        self.input_tokens = histogram(
            f"{PREFIX}input_sequence_tokens", "Tokens of a prompt.", log_spaced(50, 128_000, 12), "model"
        )
        self.output_sequence = histogram(
            f"{PREFIX}output_sequence_tokens", "Tokens of an answer.", log_spaced(50, 32_000, 10), "model"
        )
        self.cached_tokens = histogram(
            f"{PREFIX}cached_tokens",
            "Prompt tokens found in a prefix cache.",
            log_spaced(50, 128_000, 12),
            "model",
        )
        self.tokenizer_ms = histogram(
            f"{PREFIX}tokenizer_latency_ms",
            "Time to tokenise a prompt.",
            log_spaced(0.01, 1000, 16),
            "operation",
        )
        self.migration_s = histogram(
            f"{PREFIX}model_migration_duration_seconds",
            "From the first failure's detection to the next token or the end, over all attempts.",
            log_spaced(0.001, 30, 15),
            "model",
            "migration_type",
            "outcome",
        )
        self.resume = histogram(
            "holdfast_resume_seconds",
            "What a client saw: from its last token before a fault to the next.",
            log_spaced(0.001, 30, 15),
            "cause",
        )
        self.queue_s = histogram(
            "holdfast_queue_wait_seconds",
            "How long requests waited for a free worker, and how that ended: `admitted`, `timeout`, `no_worker`, `gone`.",
            log_spaced(0.001, 30, 15),
            "model",
            "outcome",
        )
        self.decisions = counter(
            "holdfast_router_decisions", "Choices of a worker, by the mode that made them.", "model", "mode"
        )
        self.hit_rate = histogram(
            "holdfast_router_kv_hit_rate",
            "What share of a prompt's blocks the chosen worker has cached, as far as this frontend knows.",
            tuple(n / 20 for n in range(21)),
            "model",
        )
        self.overlap = histogram(
            "holdfast_router_overlap_blocks",
            "How many of a prompt's blocks those are.",
            (0, *log_spaced(1, 8192, 14)),
            "model",
        )
        self.kv_events = counter(
            "holdfast_router_kv_events",
            "KV events of workers, by how they went: `ok`, `parent_block_not_found`, `block_not_found`, `invalid_block`.",
            "event_type",
            "status",
        )
        self.kv_recoveries = counter(
            "holdfast_router_kv_recoveries",
            "`gap`: events were missing, `recovered`: they have come, `restored`: everything was told anew, `failed`: no answer.",
            "outcome",
        )
        self.kv_blocks = gauge("holdfast_router_kv_blocks", "Different KV blocks that workers say they hold.")
        self.kv_ranks = gauge(
            "holdfast_router_kv_ranks",
            "DP ranks that publish KV events: `complete`, or `incomplete` where something is being asked for.",
            "state",
        )
        self.kv_guessed = gauge(
            "holdfast_router_guessed_blocks",
            "KV blocks that are taken to be cached where workers do not say so.",
        )
        self.exposed = counter(
            "holdfast_requests_exposed", "Requests that a convicted worker had fed.", "action"
        )
        self.hangs = gauge("holdfast_worker_hangs", "Workers that this frontend has found hung.")
        self.late_ticks = gauge("holdfast_late_ticks", "Times that this frontend's own loop was late.")
        self.late_chunks = gauge("holdfast_late_chunks", "Chunks of attempts that had been left, dropped.")
        self.slow_clients = counter("holdfast_slow_clients", "Clients cut off because they did not read.")
        self.parked = gauge("holdfast_parked_requests", "Requests that wait for a worker to go on with.")
        self.breakers = worker_gauge(
            "holdfast_local_breaker_state", "This frontend's own breaker: 0 closed, 1 open, 2 half-open."
        )
        self.panic = gauge("holdfast_panic", "1 while this frontend ignores its own breakers.", "model")

    def keep(self, workers: set[str]) -> None:
        """Show no other workers: those that are gone would keep their last figures for ever."""
        for worker in self.shown - workers:
            for one in self._of_workers:
                one.remove(worker)
        self.shown &= workers

    def settle(self) -> None:
        """Count what was noted since the last time: called ten times a second, so that it is never much."""
        for one in self._histograms:
            one.settle()

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)
