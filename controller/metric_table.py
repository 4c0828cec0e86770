"""Declarative metric tables: the class body declares the metrics, each instance holds the collectors.

    class Queues(MetricTable):
        waiting = gauge("holdfast_waiting", "Requests that wait.", "model")

    Queues(registry).waiting.labels("m").set(3)

Rows are registered in declaration order, which is the order of a scrape. A row's collector is stored in the table's own
`__dict__`, so reading it costs no more than reading any attribute.
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

    name: str  # as scraped; a counter's name without `_total`
    text: str
    labels: tuple[str, ...]
    make: Callable[["Row[M]"], M]
    bounds: tuple[float, ...] = ()  # upper bounds of a histogram's buckets, without +Inf

    @overload
    def __get__(self, table: None, owner: type) -> Self: ...
    @overload
    def __get__(self, table: object, owner: type) -> M: ...
    def __get__(self, table: object | None, owner: type) -> Self | M:
        """Return the row itself. On an instance, the collector in `__dict__` takes precedence over this descriptor."""
        return self


class MetricTable:
    """Base class of metric tables. Each instance creates the metrics that the rows of its class declare."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Create and register each row's metric. With `registry` None the table serves one scrape, as families to yield.

        Raise ValueError if the registry already has a metric of the same name.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]  # `_created` series are not wanted
        for name, row in self.rows().items():
            made = row.make(row)
            vars(self)[name] = made
            if registry is not None:
                registry.register(made)

    @classmethod
    def rows(cls) -> dict[str, Row[Any]]:
        """Return the rows by attribute name, in the order of a scrape."""
        return {name: row for name, row in vars(cls).items() if isinstance(row, Row)}

    def end(self, value: str, *labels: str) -> None:
        """Remove every series that has this value in one of these labels."""
        for name, row in self.rows().items():
            for label in set(labels) & set(row.labels):
                vars(self)[name].remove_by_labels({label: value})

    def of_kind(self, kind: type[M]) -> list[M]:
        """Return the metrics of one kind, in the order of a scrape."""
        return [made for made in vars(self).values() if isinstance(made, kind)]


def counter(name: str, text: str, *labels: str) -> Row[Counter]:
    """Declare a counter, which only increases."""
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
    """Declare a gauge that is filled at scrape time."""
    return Row(name, text, labels, lambda row: GaugeMetricFamily(row.name, row.text, labels=row.labels))
