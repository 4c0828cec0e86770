"""A source is trusted only on the subjects of its own process's workers."""

from datetime import UTC, datetime

import pytest

from events.fact import Fact, Recorded
from events.intrusion.source_rule import forged, lives_in
from events.observations import WorkerHeard, WorkerLeft
from events.order import Order

AT = datetime(2026, 1, 1, tzinfo=UTC)


def left(worker: str) -> WorkerLeft:
    return WorkerLeft(worker=worker, instance="i", mode="graceful", exit=0)


@pytest.mark.parametrize(
    ("worker", "source", "honest"),
    [
        ("w1", "worker:w1:life", True),
        ("w7", "worker:w3:life", True),  # a process of several workers, named after the first
        ("w.1", "worker:w.1:life", True),
        ("w0", "worker:w:life", True),  # one named w has the workers w0, w1 …
        ("w1", "worker:w:life", True),
        ("w1", "watch:w1:life", True),
        ("w1", "supervisor:life", True),
        ("w1", "a-program", True),  # not a role of ours: a test, or a program of the operator's
        ("w1", "worker:w2:life", False),
        ("w1", "worker:x1:life", False),
        ("w1", "frontend:f0:life", False),
        ("w1", "controller:c0:life", False),
        ("w1", "planner:p0:life", False),
    ],
)
def test_the_facts_that_a_source_may_publish(worker: str, source: str, honest: bool) -> None:
    assert (forged(left(worker), source) == "") is honest


def test_kinds_that_no_worker_may_publish_are_accepted_from_every_source() -> None:
    assert forged(WorkerHeard(worker="w1", instance="i", observer="c"), "worker:w9:life") == ""


def test_which_workers_live_in_a_process() -> None:
    assert lives_in("w3", "w3") and lives_in("w12", "w3") and lives_in("w1", "w")
    assert not (lives_in("w2", "w3") or lives_in("w03", "w2") or lives_in("x3", "w2") or lives_in("w", "w3"))


def fold(*facts: tuple[Fact, str, int]) -> list[Fact]:
    order: Order[tuple[Fact, ...]] = Order(lambda state, event: (*state, event.fact), ())
    for seq, (fact, source, number) in enumerate(facts, 1):
        order.absorb(Recorded(seq, AT, fact, f"e{seq}", source, number))
    return list(order.shown)


def test_a_forged_number_makes_no_reader_drop_what_that_source_publishes() -> None:
    heard = WorkerHeard(worker="w2", instance="i", observer="f0")
    forgery, said = (left("w1"), "frontend:f0:life", 10_000), (heard, "frontend:f0:life", 7)
    assert fold(forgery, said) == [left("w1"), heard]


def test_a_source_on_its_own_subjects_is_recognised_when_it_repeats_itself() -> None:
    again = (left("w1"), "worker:w1:life", 3)
    assert fold(again, again) == [left("w1")]
