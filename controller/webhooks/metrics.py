"""Prometheus metrics of the notifier."""

from prometheus_client import CollectorRegistry

from controller.metric_table import MetricTable, counter, gauge

OUTCOMES = ("delivered", "failed", "dead_letter", "left_out")


class NotifierMetrics(MetricTable):
    """The notifier's metrics, in the process's own registry."""

    deliveries = counter(
        "holdfast_webhook_deliveries",
        "Delivery attempts by outcome: delivered, failed (retried later), dead_letter (given up), left_out (the template has "
        "nothing for it)",
        "webhook",
        "outcome",
    )
    pending = gauge("holdfast_webhook_pending", "Events waiting for this webhook", "webhook")
    lag = gauge(
        "holdfast_webhook_lag_seconds", "Age of the event being delivered; 0: none is waiting", "webhook"
    )
    in_a_row = gauge("holdfast_webhook_failures_in_a_row", "Consecutive failed tries", "webhook")
    last_success = gauge(
        "holdfast_webhook_last_success_timestamp_seconds",
        "Unix time of the last accepted event; 0: none yet",
        "webhook",
    )
    stopped = gauge("holdfast_webhook_stopped", "1: it answered 410 Gone and gets no more events", "webhook")

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the metrics in the process's registry."""
        super().__init__(registry)
        self.registry = registry

    def begin(self, webhook: str) -> None:
        """Create all series of a webhook, at 0."""
        for outcome in OUTCOMES:
            self.deliveries.labels(webhook, outcome)
        for one in (self.pending, self.lag, self.in_a_row, self.last_success, self.stopped):
            one.labels(webhook).set(0)
