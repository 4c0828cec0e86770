"""Histograms for the token path: plain lists and numbers, rendered only at a scrape.

`prometheus_client` takes as long to observe one value as the frontend takes to relay a token. Here a value is noted by one
`append` and counted ten times a second. A caller that counts often keeps the buckets of its labels and so avoids the lookup.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from controller.metric_table import Row


def log_spaced(first: float, last: float, count: int) -> tuple[float, ...]:
    """Return `count` bounds from `first` to `last`, evenly spaced on a logarithmic scale, with two significant digits."""
    ratio = (last / first) ** (1 / (count - 1))
    return tuple(float(f"{first * ratio**place:.2g}") for place in range(count))


class Buckets:
    """The histogram of one label set. Noted values are counted by each `settle` and at each scrape."""

    __slots__ = ("_bounds", "_noted", "counts", "note", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._noted: list[float] = []
        self.note = self._noted.append
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @property
    def pending(self) -> int:
        """How many noted values are not counted yet."""
        return len(self._noted)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, or the same value several times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def settle(self) -> None:
        """Count the noted values."""
        noted, counts = self._noted, self.counts
        if not noted:
            return
        for index, count in Counter(map(bisect_left, repeat(self._bounds), noted)).items():
            counts[index] += count
        self.total = sum(noted, self.total)
        noted.clear()

    def rows(self) -> list[tuple[str, float]]:
        """Return the cumulative counts, by upper bound."""
        bounds = (*map(str, self._bounds), "+Inf")
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


class LabelledHistogram(Collector):
    """A histogram with labels."""

    def __init__(self, row: "Row[LabelledHistogram]") -> None:
        self._row = row
        self._by: dict[tuple[str, ...], Buckets] = {}

    def of(self, *labels: str) -> Buckets:
        """Return the buckets of one label set. Keep them: this is a dictionary lookup."""
        found = self._by.get(labels)
        if found is None:
            found = self._by[labels] = Buckets(self._row.bounds)
        return found

    def settle(self) -> None:
        """Count the noted values of all label sets."""
        for buckets in self._by.values():
            buckets.settle()

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._row.name, self._row.text, labels=self._row.labels)
        self.settle()
        for labels, buckets in self._by.items():
            family.add_metric(labels, buckets=buckets.rows(), sum_value=buckets.total)
        yield family


def token_histogram(name: str, text: str, *labels: str, bounds: Sequence[float]) -> Row[LabelledHistogram]:
    """Declare a histogram of a size or duration per request or token, with these upper bounds of its buckets."""
    return Row(name, text, labels, LabelledHistogram, tuple(bounds))
