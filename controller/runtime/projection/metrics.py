"""The projector's metrics."""

from prometheus_client import CollectorRegistry

from controller.metric_table import MetricTable, counter, gauge, histogram

BATCHES = (1, 2, 5, 10, 50, 100, 500, 1_000, 5_000, 10_000)


class ProjectorMetrics(MetricTable):
    """The projector's metrics, in the registry of its process."""

    position = gauge("holdfast_projector_position", "Stream sequence of the last event in the state store")
    lag = gauge("holdfast_projector_lag", "Journal events that are not in the state store yet")
    events = counter("holdfast_projector_events", "Events projected by this process")
    restarts = counter(
        "holdfast_projector_restarts",
        "Times the projector restarted from the store's position, after a failure or another projector",
    )
    skipped = counter(
        "holdfast_journal_skipped",
        "Invalid messages on the journal that this process has skipped",
    )
    batch = histogram("holdfast_projector_batch_events", "Events per transaction", bounds=BATCHES)

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register with the process's registry."""
        super().__init__(registry)
        self.registry = registry

    def written(self, seq: int, events: int) -> None:
        """Record one committed batch."""
        self.position.set(seq)
        self.events.inc(events)
        self.batch.observe(events)
