"""Tables of metrics: a class whose body says what there is, and whose instances hold what counts it.

    class Queues(MetricTable):
        waiting = gauge("holdfast_waiting", "Requests that wait.", "model")

    Queues(registry).waiting.labels("m").set(3)

Rows are registered in the order in which they stand, which is the order of a scrape. What a row makes lies in its
table's own `__dict__`, so that reading it costs what any attribute costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, overload

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily

M = TypeVar("M")


@dataclass(frozen=True)
class Row(Generic[M]):
    """One metric: what it is called, what it says, by which labels, and what counts it."""

    name: str  # as it is scraped; a counter's without `_total`
    text: str
    labels: tuple[str, ...]
    make: Callable[["Row[M]"], M]
    bounds: tuple[float, ...] = ()  # of a histogram's buckets, without the last, which has none

    @overload
    def __get__(self, table: None, owner: type) -> Self: ...
    @overload
    def __get__(self, table: object, owner: type) -> M: ...
    def __get__(self, table: object | None, owner: type) -> Self | M:
        """Return the row itself: what it makes stands before it, in the table."""
        return self


class MetricTable:
    """The metrics that the rows in a class's body declare, made anew for each instance."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Make each row's metric and register it. `registry` None: for one scrape, as families that are yielded.

        Raise ValueError if the registry has a metric of one of these names already.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]  # names that nobody asked for
        for name, row in self.rows().items():
            made = row.make(row)
            vars(self)[name] = made
            if registry is not None:
                registry.register(made)

    @classmethod
    def rows(cls) -> dict[str, Row[Any]]:
        """Return the rows by their attribute, in the order of a scrape."""
        return {name: row for name, row in vars(cls).items() if isinstance(row, Row)}

    def end(self, value: str, *labels: str) -> None:
        """End every series that has this value in one of these labels."""
        for name, row in self.rows().items():
            for label in set(labels) & set(row.labels):
                vars(self)[name].remove_by_labels({label: value})

    def of_kind(self, kind: type[M]) -> list[M]:
        """Return the metrics of one kind, in the order of a scrape."""
        return [made for made in vars(self).values() if isinstance(made, kind)]


def counter(name: str, text: str, *labels: str) -> Row[Counter]:
    """Declare what only grows."""
    return Row(name, text, labels, lambda row: Counter(row.name, row.text, row.labels, registry=None))


def gauge(name: str, text: str, *labels: str) -> Row[Gauge]:
    """Declare what rises and falls."""
    return Row(name, text, labels, lambda row: Gauge(row.name, row.text, row.labels, registry=None))


def histogram(name: str, text: str, *labels: str, bounds: Sequence[float]) -> Row[Histogram]:
    """Declare what is counted by size, in buckets up to each of `bounds`."""

    def make(row: Row[Histogram]) -> Histogram:
        return Histogram(row.name, row.text, row.labels, buckets=row.bounds, registry=None)

    return Row(name, text, labels, make, tuple(bounds))


def scraped(name: str, text: str, *labels: str) -> Row[GaugeMetricFamily]:
    """Declare a gauge that is filled when somebody scrapes, from what is known then."""
    return Row(name, text, labels, lambda row: GaugeMetricFamily(row.name, row.text, labels=row.labels))
