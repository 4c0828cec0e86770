"""A table of metrics: rows in a class body, and counters in its instances."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from controller.metric_table import MetricTable, counter, gauge, histogram, scraped


class Queues(MetricTable):
    """Three metrics, one of each kind."""

    waiting = gauge("q_waiting", "Requests that wait.", "model")
    taken = counter("q_taken", "Requests that were taken.")
    seconds = histogram("q_seconds", "How long they waited.", "model", bounds=(0.1, 1))


class Look(MetricTable):
    """Metrics that are computed at scrape time."""

    depth = scraped("q_depth", "How deep it is.", "model")


def test_a_scrape_shows_the_rows_in_their_order() -> None:
    registry = CollectorRegistry()
    Queues(registry)
    helps = [line.split()[2] for line in generate_latest(registry).decode().splitlines() if "HELP" in line]
    assert helps == ["q_waiting", "q_taken_total", "q_seconds"] and list(Queues.rows()) == [
        "waiting",
        "taken",
        "seconds",
    ]


def test_each_table_counts_for_itself() -> None:
    one, other = CollectorRegistry(), CollectorRegistry()
    first, _ = Queues(one), Queues(other)
    first.taken.inc()
    assert (one.get_sample_value("q_taken_total"), other.get_sample_value("q_taken_total")) == (1, 0)


def test_a_duplicate_name_is_refused() -> None:
    registry = CollectorRegistry()
    Queues(registry)
    with pytest.raises(ValueError, match="q_waiting"):
        Queues(registry)


def test_metrics_are_found_by_their_kind() -> None:
    table = Queues(CollectorRegistry())
    assert table.of_kind(Gauge) == [table.waiting] and table.of_kind(Counter) == [table.taken]


def test_a_table_without_a_registry_is_used_for_one_scrape() -> None:
    look = Look()
    look.depth.add_metric(["m"], 3)
    assert [sample.value for sample in look.depth.samples] == [3] and not Look().depth.samples
