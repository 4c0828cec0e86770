"""Exposes the Prometheus metrics of a controller: the fleet's state, and the controller's own work.

All controllers compute the fleet's state from the same journal, and therefore expose the same state. Aggregate it over
controllers with `max`, never with `sum`. The state is read at scrape time. Counters count only the facts that arrive after the
controller's start. A restarted controller therefore does not count old facts again.

`cardinality="compact"` limits the number of series (docs/concepts/corrections.md, correction B29). The worker labels of
histograms and counters, and the source and target labels of migrations, then have the value "all". The workers' names are still
on the journal.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.deciders.fleet import Fleet
from controller.metric_table import MetricTable, counter, gauge, histogram, scraped
from controller.runtime.beats import Beats
from events import observations as seen
from events.decisions import HealthStatus
from events.fact import Fact, Recorded
from events.journal.counters import ObservedJournal
from events.process.exposition import written

Cardinality = Literal["full", "compact"]
CONTENT_TYPE = CONTENT_TYPE_LATEST
ALL = "all"
REASONS: tuple[seen.CanaryReason, ...] = get_args(seen.CanaryReason)
BREAKER = {"closed": 0, "open": 1, "half_open": 2}
CHECK_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
MIGRATION_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
BEAT_FRESH_S = 3.0
OWN: Mapping[str, str] = {
    "leader": "1 while this controller holds the lease",
    "lease_takeovers": "Times that this controller took over the lease",
    "observer_blind": "1 while more than half of the fleet is silent, so that no worker is declared silent",
    "workers_lingering": "Dead instances with a process that still runs, because it was not terminated",
    "journal_position": "Stream sequence of the last event that this controller has folded",
    "decisions": "Decisions that this controller appended",
    "settles": "Times that this controller ran the deciders",
    "settle_seconds": "Seconds spent in the deciders",
    "appends": "Attempts to append decisions; each is one fenced write",
    "appends_fenced": "Appends that were rejected because another controller had decided",
    "appends_unknown": "Appends with unknown outcome; the controller reads the journal again",
    "facts_observed": "Facts that this process recorded",
    "facts_acknowledged": "Facts of this process that the journal has acknowledged",
    "facts_retried": "Facts that were published again",
    "facts_dropped": "Facts that were dropped: the spool was full, they were a week old, or the broker can never accept them",
    "facts_withheld": "Observations that were not published, because their kind is not in force in this fleet yet",
    "journal_skipped": "Messages on the journal that are not events and that this process skipped",
    "journal_unknown": "Events that this process skipped because it does not know their kind: a newer release wrote them",
    "spool_depth": "Facts of this process that the journal has not acknowledged yet",
    "spool_bytes": "Approximate size of those facts in bytes",
    "journal_reachable": "1 while this process can write to the journal",
    "journal_bytes": "Size of the journal on the broker's disk",
    "journal_max_bytes": "Size limit of the journal, beyond which the oldest events are dropped; absent without a limit",
    "journal_free_bytes": "Free space on the broker's disk, if the broker runs on this host",
    "journal_full_in_seconds":
        "Seconds until the journal is full at the growth of the last day; absent while the journal is too young to tell, or if "
        "its oldest events are dropped before",
    "broker_certificate_ends_timestamp_seconds":
        "Expiry of the broker's certificate, in seconds since 1970; absent if the broker presents none",
}  # fmt: skip
"""Metrics of the process itself, read at scrape time and exported under holdfast_. A value of None is not exported."""
COUNTERS = (
    "lease_takeovers", "decisions", "settles", "settle_seconds", "appends", "appends_fenced",
    "appends_unknown", "facts_observed", "facts_acknowledged", "facts_retried", "facts_dropped",
    "facts_withheld", "journal_skipped", "journal_unknown",
)  # fmt: skip
"""The metrics in `OWN` that are counters. The others are gauges."""


def _own_metric(name: str, value: float | None) -> Metric:
    kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
    return kind(f"holdfast_{name}", OWN[name], value)


class ControllerMetrics(MetricTable):
    """The metrics that keep their values between scrapes: the canary loop and new facts update them.

    The canary loop uses an instance as its `CanaryMeter`. The controller's `FleetView`, which reads the journal, passes new
    facts to the instance.
    """

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
        """Register all metrics at 0 with `registry`, or with a new registry if `registry` is None."""
        super().__init__(registry or CollectorRegistry())
        self._compact = cardinality == "compact"
        self._known: set[str] = set()  # workers with counters of failures
        for method in ("transfer", "reprefill"):
            self.migration_seconds.labels(method)

    # --- measured by the canary loop ------------------------------------------------------------------------

    def count_probe(self, worker: str, check_type: seen.CheckType, seconds: float) -> None:
        """Record the seconds that the answer to one canary probe took."""
        self.checks.labels(self._worker(worker), check_type).observe(seconds)

    def spent(self, worker: str, gpu_seconds: float) -> None:
        """Add the device time that a canary used, in GPU-seconds."""
        self.gpu_seconds.labels(self._worker(worker)).inc(gpu_seconds)

    def late(self, seconds: float) -> None:
        """Record how many seconds after its scheduled time a canary probe started."""
        self.lateness.set(seconds)

    def _worker(self, worker: str) -> str:
        return ALL if self._compact else worker

    # --- counted from the journal ---------------------------------------------------------------------------

    def set_workers(self, fleet: Fleet) -> None:
        """Create the counters of new workers at 0, and remove those of workers that have left the fleet.

        A counter must exist at 0, because Prometheus would miss the first increase of a counter that appears at 1
        (docs/concepts/corrections.md, correction B26).
        """
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
        """Update the counters with events. The caller must pass only events that were recorded after this controller's start."""
        for recorded in batch:
            self._count(recorded.fact)

    def _count(self, fact: Fact) -> None:
        match fact:
            case seen.WorkerJoined() if fact.worker not in self._known:
                self._begin(fact.worker)
            case seen.WorkerAwaited() if fact.name_taken_by:
                self.names_taken.inc()
            case seen.IntrusionRefused():
                self.intrusions.inc(fact.times)
            case seen.RequestMigrated():
                ends = (ALL, ALL) if self._compact else (fact.source, fact.target)
                self.migrations.labels(*ends, fact.method).inc()
                self.migration_seconds.labels(fact.method).observe(fact.gap_ms / 1000)
            case seen.WorkerObservation() | seen.ExposureUnknown() if fact.worker not in self._known:
                pass  # the series of a worker that has left are removed
            case seen.CanaryFailed():
                self.canary_failures.labels(fact.worker, fact.reason).inc()
            case seen.CanarySlow():
                self.canary_failures.labels(fact.worker, "latency_spike").inc()
            case seen.GoldenDisputed():
                self.disputes.labels(fact.worker).inc()
            case seen.TokensUnlikely():
                self.tokens_unlikely.labels(fact.worker).inc()
            case seen.ExposureUnknown():
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


@dataclass(eq=False)
class FleetCollector(Collector):
    """Collects the state metrics at scrape time: from the fleet's state, the heartbeats and the process's own metrics."""

    look: Callable[[], Fleet]
    beats: Beats | None  # without them, no worker counts as reporting
    own: Callable[[], Mapping[str, float | None]]  # the process's own numbers (`OWN`)

    def collect(self) -> Iterable[Metric]:
        fleet, gauges = self.look(), FleetGauges()
        _fill_workers(gauges, fleet)
        self._fill_reports(gauges, fleet)
        _fill_models(gauges, fleet)
        own = self.own()
        return [*gauges.of_kind(GaugeMetricFamily), *(_own_metric(name, own.get(name, 0.0)) for name in OWN)]

    def _fill_reports(self, gauges: FleetGauges, fleet: Fleet) -> None:
        living = {name: worker for name, worker in fleet.workers.items() if worker.alive}
        reporting = 0
        for name, worker in living.items():
            beat = self.beats and self.beats.fresh(name, worker.joined.instance, BEAT_FRESH_S)
            if beat:
                reporting += 1
                gauges.skew.add_metric([name], beat.skew_s)
        gauges.registered.add_metric([], len(living))
        gauges.reporting.add_metric([], reporting)
        gauges.awaited.add_metric([], len(fleet.waiting))


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
    ready = Counter(one.joined.model for one in workers if one.spare.kept and one.fully_healthy)
    empty = Counter(one.joined.model for one in workers if one.lost and not one.spare.kept)
    for model, weight in weights.items():
        gauges.spares.add_metric([model], ready[model])
        gauges.empty.add_metric([model], empty[model])
        gauges.capacity.add_metric([model], weight)
        gauges.level.add_metric([model], levels.get(model, 0))
    gauges.worst_level.add_metric([], max(levels.values(), default=0))
    gauges.incidents.add_metric([], len(fleet.incidents))


class JournalMetrics(Collector):
    """Collects, at scrape time, the metrics of a process's access to the journal."""

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
        return [_own_metric(name, value) for name, value in values.items()]
