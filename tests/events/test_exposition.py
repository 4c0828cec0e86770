"""Metrics are exposed exactly as prometheus_client would write them, and compressed where accepted."""

import gzip
import math

import pytest
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from events.process.exposition import LARGE_BYTES, LabelSets, packed, written

VALUES = (0, 1, 999, 1000, 0.5, -1, 1e6, 123456789, 1e21, 1e-7, math.inf, -math.inf, math.nan)


def test_the_text_is_prometheus_clients_own() -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    gauge = Gauge("a_gauge", 'says "this"\nand \\ that', ["worker", "b"], registry=registry)
    for value in VALUES:
        gauge.labels(f"{value}", 'of "w"\n\\').set(value)
    gauge.labels("of", "w").set(1)
    Gauge("bare", "without labels", registry=registry).set(3)
    Counter("some", "which grow", ["worker"], registry=registry).labels("w").inc(2.5)
    sizes = Histogram("sizes", "by size", ["worker"], buckets=(0.1, 1, 10), registry=registry)
    for size in (0.05, 0.5, 5, 50):
        sizes.labels("w").observe(size)
    Counter("unused", "has no series", ["worker"], registry=registry)
    assert written(registry.collect()) == generate_latest(registry)
    known = LabelSets()  # of one answer that is written in parts
    parts = [written((family,), known) for family in registry.collect()]
    assert b"".join(parts) == generate_latest(registry)
    assert known[("worker", "w")] == '{worker="w"}'


@pytest.mark.parametrize(
    ("accepts", "is_packed"),
    [
        ("gzip", True),
        ("deflate, gzip;q=1.0", True),
        ("", False),
        ("identity", False),
        ("gzip; q=0", False),
        ("br", False),
    ],
)
def test_it_is_compressed_for_clients_that_accept_it(accepts: str, is_packed: bool) -> None:
    body = b"metric 1.0\n" * 1000
    came, coded = packed(body, accepts)
    assert (gzip.decompress(came) if is_packed else came) == body
    assert coded.get("Content-Encoding") == ("gzip" if is_packed else None)


def test_a_small_answer_is_not_compressed() -> None:
    assert packed(b"x" * (LARGE_BYTES - 1), "gzip") == (b"x" * (LARGE_BYTES - 1), {})
