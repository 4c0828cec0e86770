"""Histograms and counters for the token path: plain lists and numbers, rendered only when somebody asks.

`prometheus_client` observes one value in the time in which we relay a token. Here a value is noted by one `append`,
and counted ten times a second; who counts often keeps the buckets of his labels, and looks nothing up.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from controller.metric_table import Row


def log_spaced(first: float, last: float, count: int) -> tuple[float, ...]:
    """Return `count` bounds from `first` to `last`, evenly spaced in their logarithm, with two significant digits."""
    ratio = (last / first) ** (1 / (count - 1))
    return tuple(float(f"{first * ratio**place:.2g}") for place in range(count))


class Buckets:
    """One histogram of one label set. What is noted is counted when somebody looks, and with each `settle`."""

    __slots__ = ("_bounds", "_noted", "counts", "note", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._noted: list[float] = []
        self.note: Callable[[float], None] = self._noted.append
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @property
    def pending(self) -> int:
        """How many values were noted and are not counted yet."""
        return len(self._noted)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, or the same value several times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def settle(self) -> None:
        """Count what was noted."""
        noted, counts = self._noted, self.counts
        if not noted:
            return
        for place, count in Counter(map(bisect_left, repeat(self._bounds), noted)).items():
            counts[place] += count
        self.total = sum(noted, self.total)
        noted.clear()

    def rows(self) -> list[tuple[str, float]]:
        """Return the cumulative counts, by upper bound."""
        out, running = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self.counts, strict=True):
            running += count
            out.append((bound, float(running)))
        return out


class LabelledHistogram(Collector):
    """A histogram by labels."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]) -> None:
        self._name, self._text, self._bounds, self._labels = name, text, tuple(bounds), tuple(labels)
        self._by: dict[tuple[str, ...], Buckets] = {}

    def of(self, *labels: str) -> Buckets:
        """Return the buckets of one label set. Keep them: this is a look-up."""
        found = self._by.get(labels)
        if found is None:
            found = self._by[labels] = Buckets(self._bounds)
        return found

    def settle(self) -> None:
        """Count what was noted, of all label sets."""
        for buckets in self._by.values():
            buckets.settle()

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        self.settle()
        for labels, buckets in self._by.items():
            family.add_metric(labels, buckets=buckets.rows(), sum_value=buckets.total)
        yield family


class LabelledCount(Collector):
    """A counter or a gauge by labels, for what changes with each request."""

    def __init__(
        self,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str],
    ) -> None:
        self._family, self._name, self._text, self._labels = family, name, text, tuple(labels)
        self._by: dict[tuple[str, ...], int] = {}

    def add(self, count: int, *labels: str) -> None:
        """Add so much to one label set's."""
        self._by[labels] = self._by.get(labels, 0) + count

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        family = self._family(self._name, self._text, labels=self._labels)
        for labels, count in self._by.items():
            family.add_metric(labels, count)
        yield family


def request_counter(name: str, text: str, *labels: str) -> Row[LabelledCount]:
    """Declare what grows with each request."""
    return Row(name, text, labels, partial(_count, CounterMetricFamily))


def request_gauge(name: str, text: str, *labels: str) -> Row[LabelledCount]:
    """Declare what rises and falls with each request."""
    return Row(name, text, labels, partial(_count, GaugeMetricFamily))


def _count(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily], row: Row[LabelledCount]
) -> LabelledCount:
    return LabelledCount(family, row.name, row.text, row.labels)


def token_histogram(name: str, text: str, *labels: str, bounds: Sequence[float]) -> Row[LabelledHistogram]:
    """Declare what is counted by size with each request or token, in buckets up to each of `bounds`."""

    def make(row: Row[LabelledHistogram]) -> LabelledHistogram:
        return LabelledHistogram(row.name, row.text, row.bounds, row.labels)

    return Row(name, text, labels, make, tuple(bounds))
