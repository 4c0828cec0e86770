"""Properties of the pure admission queue: FIFO, bound, no starvation, no trace of withdrawals.

With one tier and client it is a plain list. Its bound holds, no request starves, and a withdrawn request has no effect on the
others.
"""

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.frontend.admission.queue import Line, Queue, QueuedRequest

MODELS = ("m", "n")
LINEAGES = (None, ("r1", "t"), ("r2", "t"))
CLIENTS = ("a", "b", "c")


def request(number: int, model: str = "m", **more: Any) -> QueuedRequest:
    return QueuedRequest(model, number=number, **more)


def numbers(requests: Iterable[QueuedRequest]) -> list[int]:
    return [one.number for one in requests]


def state(line: Line) -> tuple[list[int], list[float]]:
    """Return everything that a line stores about its requests, and its query results."""
    kept = deepcopy(line)
    order = []
    while (head := kept.head(0.0)) is not None:
        order.append(head.number)
        kept.remove(head, served=True)
    return order, [line.before(tier, client) for tier in range(4) for client in (*CLIENTS, "new")]


STEPS = st.lists(
    st.tuples(st.sampled_from(("push", "back", "serve", "leave")), st.integers(0, 50)), max_size=80
)


@given(STEPS)
def test_with_one_tier_one_client_and_no_deadline_the_queue_is_a_plain_list(
    steps: list[tuple[str, int]],
) -> None:
    queue = Queue()
    line = queue.line("m")
    plain, back = list[int](), list[int]()
    waiting: dict[int, QueuedRequest] = {}
    for now, (what, which) in enumerate(steps):
        if what in ("push", "back"):
            one = waiting[now] = request(now, sent_back=what == "back", since=float(now))
            queue.line_of(one).push(one)
            (back if one.sent_back else plain).append(now)
        elif what == "serve" and (head := line.head(float(now))) is not None:
            assert head.number == plain.pop(0)
            line.remove(waiting.pop(head.number), served=True)
        elif what == "leave" and waiting:
            number = list(waiting)[which % len(waiting)]
            one = waiting.pop(number)
            queue.line_of(one).remove(one)
            (back if one.sent_back else plain).remove(number)
        assert numbers(line) == plain
        assert numbers(queue.sent_back("m")) == back, "in the order of their return"
        assert queue.length("m") == len(plain) + len(back)
        assert queue.in_line("m") == len(plain), "the bound does not apply to sent-back requests"


PLACED = st.tuples(
    st.sampled_from(MODELS),
    st.sampled_from(LINEAGES),
    st.integers(0, 2),
    st.sampled_from(CLIENTS),
    st.sampled_from((0.5, 1.0, 2.0)),
    st.booleans(),
)


def placed(number: int, given: tuple[Any, ...]) -> QueuedRequest:
    model, lineage, tier, client, work, sent_back = given
    return request(
        number, model, lineage=lineage, tier=tier, client=client, work=work, sent_back=sent_back, latest=9.0
    )


@pytest.mark.slow
@given(st.lists(PLACED, max_size=40), st.integers(1, 6))
def test_the_bound_holds_for_each_model_over_all_lines(given: list[tuple[object, ...]], most: int) -> None:
    queue = Queue(most)
    counts = dict.fromkeys(MODELS, 0)
    for number, one in enumerate(given):
        made = placed(number, one)
        if made.sent_back:
            queue.line_of(made).push(made)
            continue
        assert queue.full(made.served) == (counts[made.served] == most)
        if not queue.full(made.served):
            queue.line_of(made).push(made)
            counts[made.served] += 1
    assert {model: queue.in_line(model) for model in MODELS} == counts
    assert all(count <= most for count in counts.values())
    assert sum(queue.waiting().values()) == sum(queue.length(model) for model in queue.names())


@given(st.lists(PLACED, min_size=1, max_size=30), st.data())
def test_a_withdrawn_request_leaves_no_trace(given: list[tuple[object, ...]], data: st.DataObject) -> None:
    """The queue answers as if the request had never arrived, except for the order of clients with equal accounts."""
    gone = data.draw(st.integers(0, len(given) - 1))
    queue, never = Queue(), Queue()
    made = [placed(number, one) for number, one in enumerate(given)]
    for number, one in enumerate(made):
        queue.line_of(one).push(one)
        if number != gone:
            other = placed(number, given[number])
            never.line_of(other).push(other)
    for _ in range(2):  # the second call has no further effect
        queue.line_of(made[gone]).remove(made[gone])
    assert queue.waiting() == never.waiting()
    for model in MODELS:
        assert numbers(queue.sent_back(model)) == numbers(never.sent_back(model))
        for lineage in LINEAGES:
            ours, others = queue.line(model, lineage), never.line(model, lineage)
            order, before = state(ours)
            expected, expected_before = state(others)
            assert sorted(order) == sorted(expected)
            assert tiers(made, order) == sorted(tiers(made, order)), "the best tier first"
            assert before == pytest.approx(expected_before)


def tiers(made: list[QueuedRequest], order: list[int]) -> list[int]:
    return [made[number].tier for number in order]


@given(st.lists(st.tuples(st.sampled_from(CLIENTS), st.floats(0.1, 4.0)), min_size=1, max_size=40))
def test_no_request_of_a_tier_starves(others: list[tuple[str, float]]) -> None:
    """However many requests of other clients arrive, at most one of each is served before it."""
    line = Line()
    line.push(request(-1, client="waits", work=4.0))
    served, rounds = 0, 0
    numbered = iter(range(10_000))
    while True:
        for client, work in others:  # other clients always have more requests
            line.push(request(next(numbered), client=client, work=work))
        head = line.head(0.0)
        assert head is not None
        line.remove(head, served=True)
        rounds += 1
        if head.number == -1:
            break
        served += 1
        assert served <= len(CLIENTS), (
            "at most one request of each other client, all with equal accounts at its arrival"
        )


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_with_tiers_each_line_is_ordered_by_tier_then_arrival(ranks: list[int]) -> None:
    line = Line()
    for number, rank in enumerate(ranks):
        line.push(request(number, tier=rank, since=float(number)))
    order = []
    while (head := line.head(0.0)) is not None:
        order.append(head.number)
        line.remove(head, served=True)
    assert order == sorted(range(len(ranks)), key=lambda number: (ranks[number], number))
    assert len(line) == 0 and [*line] == []


def test_models_and_lineages_have_separate_lines() -> None:
    queue = Queue()
    assert queue.sent_back("m") == [] and queue.lines("m") == [] and queue.waiting() == {}
    one, other = request(1, lineage=LINEAGES[1]), request(2, lineage=LINEAGES[2])
    for each in (one, other):
        queue.line_of(each).push(each)
    assert queue.line("m", LINEAGES[1]).head(0.0) is one
    assert queue.line("m", LINEAGES[2]).head(0.0) is other
    assert queue.waiting() == {"m": 2} and queue.length("n") == 0


def test_a_request_without_a_deadline_has_used_up_no_time() -> None:
    assert request(1).used_up(1e9) == 0.0
    assert request(1, since=1.0, latest=3.0).used_up(2.0) == 0.5


def test_the_lines_of_a_model_and_its_adapters_are_checked_together_the_oldest_request_first() -> None:
    queue = Queue(model_of=lambda served: {"sql": "m", "legal": "m"}.get(served, served))
    for number, (served, sent_back) in enumerate(
        (("sql", False), ("n", False), ("m", False), ("legal", True))
    ):
        one = request(number, served, sent_back=sent_back)
        queue.line_of(one).push(one)
    assert queue.waiting_with("legal") == queue.waiting_with("m") == ["sql", "m", "legal"]
    assert queue.waiting_with(None) == ["sql", "n", "m", "legal"]
    assert queue.waiting() == {"m": 3, "n": 1} and queue.queued("m") == 3


def test_only_the_empty_lines_of_unknown_names_are_dropped() -> None:
    queue = Queue()
    ended, waits, known = request(1, "ended"), request(2, "waits"), request(3, "known")
    for one in (ended, waits, known):
        queue.line_of(one).push(one)
    for one in (ended, known):
        queue.line_of(one).remove(one)
    queue.keep({"known"})
    assert sorted(queue.names()) == ["known", "waits"]
