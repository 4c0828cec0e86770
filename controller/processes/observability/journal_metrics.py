"""Metrics of a process's journal connection: whether it can write, and what is waiting or was dropped.

Controllers export the same metrics among their own (`controller.metrics.OWN`), workers among theirs.
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.metrics import OWN
from events.journal.counters import ObservedJournal

EXPORTED = ("journal_reachable", "spool_depth", "facts_dropped", "facts_withheld", "journal_unknown")


class JournalMetrics(Collector):
    """Collects journal metrics at scrape time."""

    def __init__(self, journal: ObservedJournal) -> None:
        self._journal = journal

    def collect(self) -> Iterable[Metric]:
        journal = self._journal
        counters = journal.counters
        values = (
            journal.reachable,
            journal.spool_depth,
            counters.dropped,
            counters.withheld,
            counters.unknown,
        )
        for name, value in zip(EXPORTED, values, strict=True):
            text, kind = OWN[name]
            family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            yield family(f"holdfast_{name}", text, value=float(value))
