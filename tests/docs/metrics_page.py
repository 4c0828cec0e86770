"""Generates the tables of docs/reference/metrics.md from the product's metric registries:

python tests/docs/metrics_page.py
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from controller.deciders.fleet import Fleet
from controller.frontend.metrics import FrontendMetrics
from controller.metrics import ControllerMetrics, FleetCollector, JournalMetrics
from controller.runtime.planning import PlannerMetrics
from controller.runtime.projection.projector import ProjectorMetrics
from controller.webhooks.delivery import NotifierMetrics
from events.journal.counters import JournalCounters
from workers.admin.server import WorkerMetrics

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
BEGIN = "<!-- generated: metrics (python tests/docs/metrics_page.py) -->"
END = "<!-- end of generated -->"


@dataclass(frozen=True)
class Entry:
    """One metric as exposed to a scrape."""

    name: str
    type: str
    labels: tuple[str, ...]
    text: str


@dataclass
class SilentJournal:
    """A journal connection through which no fact has been sent."""

    reachable: bool = True
    spool_depth: int = 0
    counters: JournalCounters = field(default_factory=JournalCounters)


def roles() -> dict[str, list[Entry]]:
    """Return the metrics of each role."""
    controller = ControllerMetrics()
    controller.registry.register(FleetCollector(Fleet, None, dict))
    projector = ProjectorMetrics(CollectorRegistry())
    worker, notifier = CollectorRegistry(), CollectorRegistry()
    NotifierMetrics(notifier)
    journal = SilentJournal()
    worker.register(WorkerMetrics([], journal))
    frontend, planner = FrontendMetrics().registry, PlannerMetrics(CollectorRegistry()).registry
    for speaks in (frontend, planner):
        speaks.register(JournalMetrics(journal))
    registries = {
        "Controller": controller.registry,
        "Frontend": frontend,
        "Notifier": notifier,
        "Planner": planner,
        "Projector": projector.registry,
        "Worker": worker,
    }
    return {role: sorted(_entries(registry), key=lambda e: e.name) for role, registry in registries.items()}


def _entries(registry: CollectorRegistry) -> Iterator[Entry]:
    collectors: list[Collector] = list(registry._collector_to_names)
    for collector in collectors:
        for family in collector.collect():
            labels: Any = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield Entry(name, family.type, tuple(labels), family.documentation)


def tables() -> str:
    """Return the page's generated part."""
    lines = []
    for role, entries in roles().items():
        lines += [f"### {role}", "", "| metric | type | labels | says |", "|---|---|---|---|"]
        for e in entries:
            labels = ", ".join(f"`{label}`" for label in e.labels)
            lines.append(f"| `{e.name}` | {e.type} | {labels} | {e.text.rstrip('.')} |")
        lines.append("")
    return "\n".join(lines)


def renewed(page: str) -> str:
    """Return `page` with its tables generated again."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
