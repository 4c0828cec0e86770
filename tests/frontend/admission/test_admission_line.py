"""The queue for busy workers: by tier, fair between clients, newest first when over its target."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.frontend.admission.queue import INTERVAL_S, OWED_MAX, USED_UP, Line, QueuedRequest

CLIENTS = ("a", "b", "c")
NUMBERS = itertools.count()


@dataclass(slots=True, eq=False)
class Placed(QueuedRequest):
    """A request with a name."""

    label: str = ""


def place(
    label: str, tier: int = 0, client: str = "a", work: float = 1.0, since: float = 0.0, latest: float = 10.0
) -> Placed:
    return Placed("m", None, tier, client, work, since, latest, number=next(NUMBERS), label=label)


def label(request: QueuedRequest | None) -> str:
    assert isinstance(request, Placed)
    return request.label


def line_of(*places: Placed) -> Line:
    line: Line = Line()
    for one in places:
        line.push(one)
    return line


def served(line: Line, count: int, now: float = 1.0) -> list[str]:
    """Serve this many requests and return their names."""
    order = []
    for _ in range(count):
        head = line.head(now)
        assert head is not None
        line.remove(head, served=True)
        order.append(label(head))
    return order


def test_one_client_of_one_tier_is_served_in_the_order_of_arrival() -> None:
    line = line_of(*(place(f"r{n}") for n in range(4)))
    assert served(line, 4) == ["r0", "r1", "r2", "r3"]
    assert line.head(1.0) is None and len(line) == 0


def test_the_better_tier_is_served_first_whatever_its_arrival() -> None:
    line = line_of(place("late", 2), place("usual", 1), place("best", 0))
    assert served(line, 3) == ["best", "usual", "late"]


def test_a_client_with_many_requests_does_not_hold_up_one_with_few() -> None:
    line = line_of(*(place(f"a{n}", client="a") for n in range(5)), place("b0", client="b"))
    assert served(line, 3) == ["a0", "b0", "a1"]


def test_fair_is_by_work_and_not_by_requests() -> None:
    line = line_of(
        *(place(f"long{n}", client="a", work=4.0) for n in range(3)),
        *(place(f"short{n}", client="b", work=1.0) for n in range(8)),
    )
    order = served(line, 10)
    work = {"a": 0.0, "b": 0.0}
    for name in order[:10]:
        work["a" if name.startswith("long") else "b"] += 4.0 if name.startswith("long") else 1.0
    assert work == {"a": 8.0, "b": 8.0}


def test_a_client_that_returns_starts_at_the_account_of_the_others() -> None:
    line = line_of(place("a0", client="a"), *(place(f"b{n}", client="b") for n in range(9)))
    served(line, 7)
    line.push(place("a1", client="a"))
    line.push(place("a2", client="a"))
    assert served(line, 3).count("a1") == 1, "no credit was saved up in the meantime"
    assert len(line) == 2


def test_an_account_is_not_lost_by_leaving_the_queue_for_a_moment() -> None:
    line = line_of(place("a0", client="a", work=5.0), *(place(f"b{n}", client="b") for n in range(9)))
    assert served(line, 1) == ["a0"]
    line.push(place("a1", client="a"))
    assert served(line, 5) == ["b0", "b1", "b2", "b3", "b4"]


def test_accounts_of_clients_without_waiting_requests_are_bounded() -> None:
    line = line_of(*(place(f"x{n}", client="x") for n in range(4)))
    for n in range(OWED_MAX + 50):
        line.push(place("one", client=f"c{n}", work=9.0))
        head = line.head(1.0)
        while head is not None and label(head) != "one":
            line.remove(head, served=True)
            line.push(place("x", client="x"))
            head = line.head(1.0)
        assert head is not None
        line.remove(head, served=True)
    tier = next(iter(line._tiers.values()))  # no public attribute shows them
    assert len(tier._owed) <= OWED_MAX


def test_over_its_target_for_an_interval_the_newest_is_served_and_below_it_the_oldest_again() -> None:
    line = line_of(*(place(f"r{n}", since=float(n), latest=n + 10.0) for n in range(4)))
    target = 10.0 * USED_UP
    head = line.head(target - 0.01)
    assert label(head) == "r0"
    head = line.head(target + 0.01)
    assert label(head) == "r0", "not yet for an interval"
    head = line.head(target + 0.02 + INTERVAL_S)
    assert label(head) == "r3"
    line.remove(next(iter(line)))  # the oldest is late
    head = line.head(target + 0.03 + INTERVAL_S)
    assert label(head) == "r1", "the next one has used up less"


def test_a_request_that_leaves_costs_its_client_nothing() -> None:
    gone = place("gone", client="a", work=9.0)
    line = line_of(gone, place("a1", client="a"), place("b0", client="b"))
    line.remove(gone)
    line.remove(gone)
    assert len(line) == 2, "removing twice has no further effect"
    assert served(line, 2) == ["a1", "b0"]


@pytest.mark.parametrize(
    ("tier", "client", "before"),
    [
        (0, "new", 2.0),  # the work of premium alone
        (1, "a", 2.0 + 3.0 + 1.0),  # all the work of its client, and as much of the other one
        (1, "b", 2.0 + 1.0 + 2.0),
        (1, "new", 2.0 + 2.0),  # one of each client in front
        (2, "new", 2.0 + 4.0),
    ],
)
def test_work_before_a_request_is_the_better_tiers_and_a_fair_share_of_its_own(
    tier: int, client: str, before: float
) -> None:
    line = line_of(
        place("p", 0, "p", 2.0),
        *(place(f"a{n}", 1, "a", 1.0) for n in range(3)),
        place("b0", 1, "b", 1.0),
    )
    assert line.before(tier, client) == pytest.approx(before)


Step = tuple[str, int, str, float]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("push", "serve", "leave")),
        st.integers(0, 2),
        st.sampled_from(CLIENTS),
        st.floats(0.1, 5.0),
    ),
    max_size=60,
)


@given(STEPS)
def test_no_request_is_lost_or_served_twice_and_the_work_adds_up(steps: list[Step]) -> None:
    line: Line = Line()
    waiting: dict[QueuedRequest, None] = {}
    for number, (what, tier, client, work) in enumerate(steps):
        now = number * 0.01
        if what == "push":
            one: QueuedRequest = place(str(number), tier, client, work, now, now + 0.3)
            waiting[one] = None
            line.push(one)
        elif what == "serve":
            head = line.head(now)
            assert (head is None) == (not waiting)
            if head is not None:
                assert head.tier == min(other.tier for other in waiting)
                del waiting[head]
                line.remove(head, served=True)
        elif waiting:
            one = next(iter(waiting))
            del waiting[one]
            line.remove(one)
        assert len(line) == len(waiting)
        assert set(line) == set(waiting)
        whole = sum(one.work for one in waiting)
        assert line.before(3, "x") == pytest.approx(whole, abs=1e-6), "all work is before the last tier"


@given(STEPS)
def test_a_waiting_client_is_never_behind_another_by_more_than_one_request(steps: list[Step]) -> None:
    """For two clients that wait all the time, the work served differs by at most one request of each (start-time fair
    queueing).
    """
    line: Line = Line()
    had = dict.fromkeys(CLIENTS, 0.0)
    for client in CLIENTS:
        for number in range(40):
            line.push(place(str(number), 0, client, 0.1 + (number * 7 % 5)))
    for _ in steps:
        head = line.head(0.1)
        assert head is not None
        line.remove(head, served=True)
        had[head.client] += head.work
        assert max(had.values()) - min(had.values()) <= 2 * 4.1 + 1e-9
