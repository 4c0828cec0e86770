"""Exposes the Prometheus metrics of a controller: the fleet's state, and the controller's own work.

Every controller folds the same journal and therefore exposes the same fleet. Aggregate over controllers with `max`, never with
`sum`. State is read from the fold at scrape time. Counters count only the facts that arrive after the controller's start, so
that a restart does not count history again.

`cardinality="compact"` (B29) limits the number of series. The worker labels of histograms and counters, and both ends of a
migration, get the value "all". The journal still has the names.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.deciders.fleet import Fleet
from controller.metric_table import MetricTable, counter, gauge, histogram, scraped
from controller.runtime.beats import Beats
from events.decisions import HealthStatus
from events.fact import Recorded
from events.journal.counters import ObservedJournal
from events.observations import (
    CanaryFailed,
    CanaryReason,
    CanarySlow,
    CheckType,
    ExposureUnknown,
    GoldenDisputed,
    IntrusionRefused,
    RequestMigrated,
    TokensUnlikely,
    WorkerAwaited,
    WorkerJoined,
)
from events.process.exposition import written

Cardinality = Literal["full", "compact"]
CONTENT_TYPE = CONTENT_TYPE_LATEST
ALL = "all"
REASONS: tuple[CanaryReason, ...] = get_args(CanaryReason)
BREAKER = {"closed": 0, "open": 1, "half_open": 2}
CHECK_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
MIGRATION_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
BEAT_FRESH_S = 3.0
OWN: Mapping[str, tuple[str, Literal["gauge", "counter"]]] = {
    "leader": ("1 while this controller holds the lease", "gauge"),
    "lease_takeovers": ("Times that this controller took over the lease", "counter"),
    "observer_blind": ("1 while more than half of the fleet is silent, so that no worker is declared silent", "gauge"),
    "workers_lingering": ("Dead instances with a process that still runs, because it was not terminated", "gauge"),
    "journal_position": ("Stream sequence of the last event that this controller has folded", "gauge"),
    "decisions": ("Decisions that this controller appended", "counter"),
    "settles": ("Times that this controller ran the deciders", "counter"),
    "settle_seconds": ("Seconds spent in the deciders", "counter"),
    "appends": ("Attempts to append decisions; each is one fenced write", "counter"),
    "appends_fenced": ("Appends that were rejected because another controller had decided", "counter"),
    "appends_unknown": ("Appends with unknown outcome; the controller reads the journal again", "counter"),
    "facts_observed": ("Facts that this process recorded", "counter"),
    "facts_acknowledged": ("Facts of this process that the journal has acknowledged", "counter"),
    "facts_retried": ("Facts that were published again", "counter"),
    "facts_dropped": (
        "Facts that were dropped: the spool was full, they were a week old, or the broker can never accept them",
        "counter",
    ),
    "facts_withheld": ("Observations that were not published, because their kind is not in force in this fleet yet", "counter"),
    "journal_skipped": ("Messages on the journal that are not events and that this process skipped", "counter"),
    "journal_unknown": (
        "Events that this process skipped because it does not know their kind: a newer release wrote them",
        "counter",
    ),
    "spool_depth": ("Facts of this process that the journal has not acknowledged yet", "gauge"),
    "spool_bytes": ("Approximate size of those facts in bytes", "gauge"),
    "journal_reachable": ("1 while this process can write to the journal", "gauge"),
    "journal_bytes": ("Size of the journal on the broker's disk", "gauge"),
    "journal_max_bytes": (
        "Size limit of the journal, beyond which the oldest events are dropped; absent without a limit",
        "gauge",
    ),
    "journal_free_bytes": ("Free space on the broker's disk, if the broker runs on this host", "gauge"),
    "journal_full_in_seconds": (
        "Seconds until the journal is full at the growth of the last day; absent while the journal is too young to tell, or if "
        "its oldest events are dropped before",
        "gauge",
    ),
    "broker_certificate_ends_timestamp_seconds": (
        "Expiry of the broker's certificate, in seconds since 1970; absent if the broker presents none",
        "gauge",
    ),
}  # fmt: skip
"""Metrics of the process itself, read at scrape time and exported under holdfast_. A value of None is not exported."""


class ControllerMetrics(MetricTable):
    """The metrics that are counted as facts arrive. Implements `CanaryMeter`, and is called by a FleetView for new facts."""

    checks = histogram(
        "dynamo_health_check_duration_seconds",
        "Canary health check latency",
        "worker_id", "check_type",
        bounds=CHECK_S,
    )  # fmt: skip
    migrations = counter(
        "dynamo_migration",
        "Number of request migrations",
        "source_group", "target_group", "method",
    )  # fmt: skip
    migration_seconds = histogram(
        "dynamo_migration_duration_seconds",
        "Time to migrate a single request: the gap in its stream",
        "method",
        bounds=MIGRATION_S,
    )
    canary_failures = counter(
        "dynamo_canary_failures",
        "Failed canary probes; a slow one counts as latency_spike",
        "worker_id", "reason",
    )  # fmt: skip
    disputes = counter(
        "holdfast_golden_disputes",
        "Confirmed answers that contradict another worker's provisional golden, or a configured one: one of the two is wrong",
        "worker_id",
    )
    tokens_unlikely = counter(
        "holdfast_tokens_unlikely",
        "Findings that a worker's sampled tokens are too unlikely, without convicting it; its sampler may be broken",
        "worker_id",
    )
    exposures_unknown = counter(
        "holdfast_exposure_unknown",
        "Spans in which a frontend cannot name the requests of a convicted worker, because it restarted or its memory was full",
        "worker_id",
    )
    gpu_seconds = counter(
        "holdfast_canary_gpu_seconds",
        "Device time used by canaries: answering time × devices of the worker ÷ sequences in its batch",
        "worker_id",
    )
    intrusions = counter(
        "holdfast_intrusions_refused",
        "Attempts at the embedded broker that were refused for lack of permission",
    )
    names_taken = counter(
        "holdfast_worker_names_taken",
        "Worker starts that were refused because another live worker has the name",
    )
    lateness = gauge(
        "holdfast_canary_lateness_seconds",
        "Delay of the last canary probe after its scheduled time; the sweep keeps up while this is small",
    )

    def __init__(self, cardinality: Cardinality = "full", registry: CollectorRegistry | None = None) -> None:
        """Register all metrics at 0 with `registry`, or with a new registry if it is None."""
        self.registry = registry or CollectorRegistry()
        super().__init__(self.registry)
        self._compact = cardinality == "compact"
        self._known: set[str] = set()  # workers with counters of failures
        for method in ("transfer", "reprefill"):
            self.migration_seconds.labels(method)

    # --- measured by the canary loop ------------------------------------------------------------------------

    def asked(self, worker: str, check_type: CheckType, seconds: float) -> None:
        """Record the seconds that the answer to one canary probe took."""
        self.checks.labels(self._worker(worker), check_type).observe(seconds)

    def spent(self, worker: str, gpu_seconds: float) -> None:
        """Add the device time that a canary used, in GPU-seconds."""
        self.gpu_seconds.labels(self._worker(worker)).inc(gpu_seconds)

    def late(self, seconds: float) -> None:
        """Record how many seconds after its scheduled time the last probe started."""
        self.lateness.set(seconds)

    def _worker(self, worker: str) -> str:
        return ALL if self._compact else worker

    # --- counted from the journal ---------------------------------------------------------------------------

    def know(self, fleet: Fleet) -> None:
        """Create the counters of new workers at 0, and remove those of workers that have left the fleet.

        A counter must exist at 0, because Prometheus would miss the first increase of a counter that appears at 1 (B26)."""
        for worker in fleet.workers.keys() - self._known:
            self._begin(worker)
        for worker in self._known - fleet.workers.keys():
            self._known.remove(worker)
            self.end(worker, "worker_id", "source_group", "target_group")

    def _begin(self, worker: str) -> None:
        self._known.add(worker)
        self.disputes.labels(worker)
        self.tokens_unlikely.labels(worker)
        self.exposures_unknown.labels(worker)
        for reason in REASONS:
            self.canary_failures.labels(worker, reason)

    def count(self, batch: Sequence[Recorded]) -> None:
        """Count events. The caller must pass only events that were recorded after the start of this controller."""
        for recorded in batch:
            fact = recorded.fact
            if isinstance(
                fact, CanaryFailed | CanarySlow | GoldenDisputed | TokensUnlikely | ExposureUnknown
            ):
                if fact.worker in self._known:  # the series of a worker that has left are removed
                    self._found(fact)
            elif isinstance(fact, RequestMigrated):
                ends = (ALL, ALL) if self._compact else (fact.source, fact.target)
                self.migrations.labels(*ends, fact.method).inc()
                self.migration_seconds.labels(fact.method).observe(fact.gap_ms / 1000)
            elif isinstance(fact, IntrusionRefused):
                self.intrusions.inc(fact.times)
            elif isinstance(fact, WorkerAwaited) and fact.name_taken_by:
                self.names_taken.inc()
            elif isinstance(fact, WorkerJoined) and fact.worker not in self._known:
                self._begin(fact.worker)

    def _found(
        self, fact: CanaryFailed | CanarySlow | GoldenDisputed | TokensUnlikely | ExposureUnknown
    ) -> None:
        match fact:
            case CanaryFailed():
                self.canary_failures.labels(fact.worker, fact.reason).inc()
            case CanarySlow():
                self.canary_failures.labels(fact.worker, "latency_spike").inc()
            case GoldenDisputed():
                self.disputes.labels(fact.worker).inc()
            case TokensUnlikely():
                self.tokens_unlikely.labels(fact.worker).inc()
            case ExposureUnknown():
                self.exposures_unknown.labels(fact.worker).inc()

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return written(self.registry.collect())


class FleetGauges(MetricTable):
    """The gauges of the fleet's state, created anew for each scrape."""

    status = scraped(
        "dynamo_worker_status",
        "Current health status (0=healthy, 1=suspicious, 2=unhealthy, 3=draining, 4=dead)",
        "worker_id", "tp_group",
    )  # fmt: skip
    state = scraped("dynamo_worker_state", "1 for the worker's current state", "worker_id", "state")
    breaker = scraped(
        "dynamo_circuit_breaker_state", "Circuit breaker state (0=closed, 1=open, 2=half_open)", "worker_id"
    )
    weight = scraped(
        "holdfast_worker_weight", "Weight of a worker in routing, 0 to 1; 0 means not routable", "worker_id"
    )
    suspect = scraped(
        "holdfast_worker_suspect",
        "1 while a worker that canaries convict still serves, because no other worker of its model does",
        "worker_id",
    )
    skew = scraped(
        "holdfast_clock_skew_seconds",
        "How far a worker's clock is ahead of this controller's; informational only",
        "worker_id",
    )
    registered = scraped("holdfast_workers_registered", "Workers that have joined and are not dead")
    reporting = scraped("holdfast_workers_reporting", "Workers that are not dead and have a fresh heartbeat")
    awaited = scraped(
        "holdfast_workers_awaited", "Worker processes that wait for their server or their model"
    )
    worst_level = scraped(
        "dynamo_degradation_level", "Current degradation level (0-4): the worst of all models"
    )
    level = scraped("holdfast_degradation_level", "A model's degradation level (0-4)", "model")
    capacity = scraped(
        "holdfast_model_routable_weight", "The sum of the weights of a model's workers", "model"
    )
    spares = scraped("holdfast_spares_ready", "Spares of a model that are ready to replace a worker", "model")
    empty = scraped("holdfast_places_empty", "Lost workers of a model that no spare has replaced", "model")
    incidents = scraped("holdfast_incidents_open", "Incidents that are open")


class FleetCollector(Collector):
    """Collects the state metrics at scrape time, from the fold, the heartbeats and the process's own numbers."""

    def __init__(
        self, look: Callable[[], Fleet], beats: Beats | None, own: Callable[[], Mapping[str, float | None]]
    ) -> None:
        """Create a collector that calls `look` for the fleet, and `own` for the process's own numbers (`OWN`).

        `beats` holds the workers' heartbeats. If it is None, no worker counts as reporting."""
        self._look = look
        self._beats = beats
        self._own = own

    def collect(self) -> Iterable[Metric]:
        fleet, gauges = self._look(), FleetGauges()
        _fill_workers(gauges, fleet)
        self._fill_reports(gauges, fleet)
        _fill_models(gauges, fleet)
        yield from gauges.of_kind(GaugeMetricFamily)
        yield from self._process()

    def _fill_reports(self, gauges: FleetGauges, fleet: Fleet) -> None:
        living = {name: worker for name, worker in fleet.workers.items() if worker.alive}
        reporting = 0
        for name, worker in living.items():
            beat = self._beats and self._beats.fresh(name, worker.joined.instance, BEAT_FRESH_S)
            if beat:
                reporting += 1
                gauges.skew.add_metric([name], beat.skew_s)
        gauges.registered.add_metric([], len(living))
        gauges.reporting.add_metric([], reporting)
        gauges.awaited.add_metric([], len(fleet.waiting))

    def _process(self) -> Iterable[Metric]:
        own = self._own()
        for name, (text, kind) in OWN.items():
            kinds = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            family, value = kinds(f"holdfast_{name}", text), own.get(name, 0.0)
            if value is not None:
                family.add_metric([], value)
            yield family


def _fill_workers(gauges: FleetGauges, fleet: Fleet) -> None:
    for name, worker in fleet.workers.items():
        health = worker.health.status
        gauges.status.add_metric([name, name], health.metric)
        for each in HealthStatus:
            gauges.state.add_metric([name, each.value.lower()], float(each is health))
        gauges.breaker.add_metric([name], BREAKER[worker.breaker.position])
        gauges.weight.add_metric([name], worker.weight)
        gauges.suspect.add_metric([name], float(worker.serves_suspect))


def _fill_models(gauges: FleetGauges, fleet: Fleet) -> None:
    weights = {worker.joined.model: 0.0 for worker in fleet.workers.values()}
    for worker in fleet.workers.values():
        weights[worker.joined.model] += worker.weight
    levels = {model: state.level for model, state in fleet.models.items()}
    workers = fleet.workers.values()
    ready = Counter(one.joined.model for one in workers if one.spare.kept and one.well)
    empty = Counter(one.joined.model for one in workers if one.lost and not one.spare.kept)
    for model, weight in weights.items():
        gauges.spares.add_metric([model], ready[model])
        gauges.empty.add_metric([model], empty[model])
        gauges.capacity.add_metric([model], weight)
        gauges.level.add_metric([model], levels.get(model, 0))
    gauges.worst_level.add_metric([], max(levels.values(), default=0))
    gauges.incidents.add_metric([], len(fleet.incidents))


class JournalMetrics(Collector):
    """Collects the metrics of a process's access to the journal at scrape time."""

    def __init__(self, journal: ObservedJournal) -> None:
        self._journal = journal

    def collect(self) -> Iterable[Metric]:
        counters = self._journal.counters
        values = {
            "journal_reachable": self._journal.reachable,
            "spool_depth": self._journal.spool_depth,
            "facts_dropped": counters.dropped,
            "facts_withheld": counters.withheld,
            "journal_unknown": counters.unknown,
        }
        for name, value in values.items():
            text, kind = OWN[name]
            family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            yield family(f"holdfast_{name}", text, value=float(value))
