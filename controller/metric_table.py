"""Declares Prometheus metrics as rows of a table class, and creates their collectors per instance.

    class Queues(MetricTable):
        waiting = gauge("holdfast_waiting", "Requests that wait.", "model")

    Queues(registry).waiting.labels("m").set(3)

Rows are registered in declaration order, and a scrape returns them in this order. The collector of a row is stored in the
instance's `__dict__` under the row's name, so that reading the collector is a plain attribute access.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, overload

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily

M = TypeVar("M")


@dataclass(frozen=True)
class Row(Generic[M]):
    """Declaration of one metric: name, help text, labels and collector type."""

    name: str  # name of the metric; for a counter without `_total`
    text: str
    labels: tuple[str, ...]
    make: Callable[["Row[M]"], M]  # creates the collector
    bounds: tuple[float, ...] = ()  # upper bounds of a histogram's buckets, without +Inf

    @overload
    def __get__(self, table: None, owner: type) -> Self: ...
    @overload
    def __get__(self, table: object, owner: type) -> M: ...
    def __get__(self, table: object | None, owner: type) -> Self | M:
        """Return the row when it is read from a table class.

        On an instance, Python finds the collector in the instance's `__dict__`, and does not call this method."""
        return self


class MetricTable:
    """Base class of metric tables. Each instance creates a collector for every row that its class declares."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Create the collector of each row, and register it with `registry`.

        If `registry` is None, the collectors are not registered. A caller that creates a new table for each scrape passes None,
        fills the collectors, and returns them to Prometheus. Raise ValueError if the registry already has a metric of the same
        name.
        """
        self.registry = registry or CollectorRegistry()
        disable_created_metrics()  # type: ignore[no-untyped-call]  # `_created` series are not wanted
        for name, row in self.rows().items():
            made = row.make(row)
            vars(self)[name] = made
            if registry is not None:
                registry.register(made)

    @classmethod
    def rows(cls) -> dict[str, Row[Any]]:
        """Return the rows by attribute name, in declaration order."""
        return {name: row for name, row in vars(cls).items() if isinstance(row, Row)}

    def end(self, value: str, *labels: str) -> None:
        """Remove every series that has the value `value` in one of the labels `labels`."""
        for name, row in self.rows().items():
            for label in set(labels) & set(row.labels):
                vars(self)[name].remove_by_labels({label: value})

    def of_kind(self, kind: type[M]) -> list[M]:
        """Return the collectors that are instances of `kind`, in declaration order."""
        return [made for made in vars(self).values() if isinstance(made, kind)]


def counter(name: str, text: str, *labels: str) -> Row[Counter]:
    """Declare a counter, which never decreases."""
    return Row(name, text, labels, lambda row: Counter(row.name, row.text, row.labels, registry=None))


def gauge(name: str, text: str, *labels: str) -> Row[Gauge]:
    """Declare a gauge, which can rise and fall."""
    return Row(name, text, labels, lambda row: Gauge(row.name, row.text, row.labels, registry=None))


def histogram(name: str, text: str, *labels: str, bounds: Sequence[float]) -> Row[Histogram]:
    """Declare a histogram with one bucket for each upper bound in `bounds`."""

    def make(row: Row[Histogram]) -> Histogram:
        return Histogram(row.name, row.text, row.labels, buckets=row.bounds, registry=None)

    return Row(name, text, labels, make, tuple(bounds))


def scraped(name: str, text: str, *labels: str) -> Row[GaugeMetricFamily]:
    """Declare a gauge that each scrape creates anew and fills, and that keeps no value between scrapes."""
    return Row(name, text, labels, lambda row: GaugeMetricFamily(row.name, row.text, labels=row.labels))
