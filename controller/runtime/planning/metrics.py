"""What the planner counts."""

from collections.abc import Collection
from contextlib import suppress

from prometheus_client import CollectorRegistry

from controller.metric_table import MetricTable, counter, gauge


class PlannerMetrics(MetricTable):
    """The planner's metrics, in a registry of the process's own."""

    provisioned = gauge("holdfast_planner_workers", "Workers of a model that are there", "model")
    wanted = gauge("holdfast_planner_workers_wanted", "Workers that it should have now", "model")
    needed = gauge("holdfast_planner_workers_needed", "Workers that what is expected needs", "model")
    expected = gauge(
        "holdfast_planner_expected_work", "Seconds of work expected in a minute, at most", "model"
    )
    error = gauge("holdfast_planner_forecast_error", "Share by which the load was misjudged lately", "model")
    held = gauge("holdfast_planner_held", "1 while something keeps the planner from a change", "model")
    achievable = gauge("holdfast_planner_achievable_rps", "Requests a second within the objectives", "model")
    proposals = counter("holdfast_planner_proposals", "Proposals of this process", "model", "why")
    fenced = counter("holdfast_planner_fenced", "Proposals that another planner was quicker with")
    applied = counter("holdfast_planner_hooks", "Calls of the hook", "outcome")
    position = gauge("holdfast_planner_position", "Stream sequence up to which the state store was read")
    age = gauge("holdfast_planner_projection_age_seconds", "How long the state store has been behind")

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register with the process's registry."""
        super().__init__(registry)
        self.registry = registry
        self._shown: set[str] = set()  # models

    def keep(self, models: Collection[str]) -> None:
        """Show no gauges of models that are gone."""
        of_models = (
            self.provisioned, self.wanted, self.needed, self.expected, self.error, self.held, self.achievable,
        )  # fmt: skip
        for model in self._shown.difference(models):
            for one in of_models:
                with suppress(KeyError):  # nothing was foreseen for it yet
                    one.remove(model)
        self._shown = set(models)
