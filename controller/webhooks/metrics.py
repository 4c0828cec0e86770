"""What the notifier counts."""

from prometheus_client import CollectorRegistry

from controller.metric_table import MetricTable, counter, gauge

OUTCOMES = ("delivered", "failed", "dead_letter", "left_out")


class NotifierMetrics(MetricTable):
    """The notifier's metrics, in a registry of the process's own."""

    deliveries = counter(
        "holdfast_webhook_deliveries",
        "Tries by what came of them: delivered, failed (tried again later), dead_letter (given up), left_out (nothing for its "
        "template)",
        "webhook",
        "outcome",
    )
    pending = gauge("holdfast_webhook_pending", "Events that wait for this webhook", "webhook")
    lag = gauge(
        "holdfast_webhook_lag_seconds", "Age of the event that it is at; 0: it has had all", "webhook"
    )
    in_a_row = gauge(
        "holdfast_webhook_failures_in_a_row", "Tries that have failed since the last that did not", "webhook"
    )
    last_success = gauge(
        "holdfast_webhook_last_success_timestamp_seconds",
        "When it last took an event, as Unix seconds; 0: not yet",
        "webhook",
    )
    stopped = gauge(
        "holdfast_webhook_stopped", "1: it has answered 410 Gone, and is told nothing any more", "webhook"
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register with the process's registry."""
        super().__init__(registry)
        self.registry = registry

    def begin(self, webhook: str) -> None:
        """Have every series of a webhook, at 0."""
        for outcome in OUTCOMES:
            self.deliveries.labels(webhook, outcome)
        for one in (self.pending, self.lag, self.in_a_row, self.last_success, self.stopped):
            one.labels(webhook).set(0)
