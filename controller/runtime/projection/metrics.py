"""What the projector counts."""

from prometheus_client import CollectorRegistry

from controller.metric_table import MetricTable, counter, gauge, histogram

BATCHES = (1, 2, 5, 10, 50, 100, 500, 1_000, 5_000, 10_000)


class ProjectorMetrics(MetricTable):
    """The projector's metrics, in a registry of the process's own."""

    position = gauge("holdfast_projector_position", "Stream sequence of the last event in the state store")
    lag = gauge("holdfast_projector_lag", "Events on the journal that the state store does not show yet")
    events = counter("holdfast_projector_events", "Events projected by this process")
    restarts = counter(
        "holdfast_projector_restarts",
        "Times the projector began anew from the store's place, after a fault or another projector",
    )
    skipped = counter(
        "holdfast_journal_skipped",
        "Messages on the journal that are no events, and that this process has stepped over",
    )
    batch = histogram("holdfast_projector_batch_events", "Events per transaction", bounds=BATCHES)

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register with the process's registry."""
        super().__init__(registry)
        self.registry = registry

    def written(self, seq: int, events: int) -> None:
        """Take in one committed batch."""
        self.position.set(seq)
        self.events.inc(events)
        self.batch.observe(events)
