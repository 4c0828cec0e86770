"""What the projector counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

BATCHES = (1, 2, 5, 10, 50, 100, 500, 1_000, 5_000, 10_000)


class ProjectorMetrics:
    """The projector's metrics, in a registry of the process's own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # names that nobody asked for
        self.registry = registry
        self.position = Gauge(
            "holdfast_projector_position",
            "Stream sequence of the last event in the state store",
            registry=registry,
        )
        self.lag = Gauge(
            "holdfast_projector_lag",
            "Events on the journal that the state store does not show yet",
            registry=registry,
        )
        self.events = Counter(
            "holdfast_projector_events", "Events projected by this process", registry=registry
        )
        self.restarts = Counter(
            "holdfast_projector_restarts",
            "Times the projector began anew from the store's place, after a fault or another projector",
            registry=registry,
        )
        self.batch = Histogram(
            "holdfast_projector_batch_events", "Events per transaction", buckets=BATCHES, registry=registry
        )

    def written(self, seq: int, events: int) -> None:
        """Take in one committed batch."""
        self.position.set(seq)
        self.events.inc(events)
        self.batch.observe(events)
