"""The planner's metrics."""

from collections.abc import Collection
from contextlib import suppress

from prometheus_client import CollectorRegistry

from controller.metric_table import MetricTable, counter, gauge


class PlannerMetrics(MetricTable):
    """The planner's metrics, in the registry of its process."""

    provisioned = gauge("holdfast_planner_workers", "Present workers of a model", "model")
    wanted = gauge("holdfast_planner_workers_wanted", "Workers that the model should have now", "model")
    needed = gauge("holdfast_planner_workers_needed", "Workers that the forecast load needs", "model")
    expected = gauge(
        "holdfast_planner_expected_work", "Highest forecast of work per minute, in worker seconds", "model"
    )
    error = gauge("holdfast_planner_forecast_error", "Recent relative error of the load forecast", "model")
    held = gauge("holdfast_planner_held", "1 while a rule keeps the planner from a change", "model")
    achievable = gauge("holdfast_planner_achievable_rps", "Requests a second within the objectives", "model")
    proposals = counter("holdfast_planner_proposals", "Proposals of this process", "model", "why")
    fenced = counter("holdfast_planner_fenced", "Proposals dropped because another planner was first")
    applied = counter("holdfast_planner_hooks", "Calls of the scaling hook", "outcome")
    position = gauge("holdfast_planner_position", "Stream sequence up to which the state store was read")
    age = gauge("holdfast_planner_projection_age_seconds", "Seconds since the state store fell behind")

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register with the process's registry."""
        super().__init__(registry)
        self.registry = registry
        self._shown: set[str] = set()  # models

    def keep(self, models: Collection[str]) -> None:
        """Remove the gauges of models that are gone."""
        of_models = (
            self.provisioned, self.wanted, self.needed, self.expected, self.error, self.held, self.achievable,
        )  # fmt: skip
        for model in self._shown.difference(models):
            for one in of_models:
                with suppress(KeyError):  # it has no forecast yet
                    one.remove(model)
        self._shown = set(models)
