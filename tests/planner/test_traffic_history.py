"""A model's history from events: known and unknown minutes, serving workers, changes."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.planner.history import MINUTES_MAX, ModelHistory
from controller.planner.sizing import Minute, Seen, Traffic
from events.fact import Observation, Recorded
from events.observations import CapacityReported, ScaleProposed, ScaleSet, TrafficReported

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


class Told:
    """A model's history, and the journal from which it is made."""

    def __init__(self) -> None:
        self.history = ModelHistory("m")
        self.seq = 0

    def say(self, fact: Observation, at: datetime, source: str = "") -> None:
        self.seq += 1
        source = source or getattr(fact, "frontend", "planner")
        self.history.take(Recorded(self.seq, at, fact, f"e{self.seq}", source, self.seq))

    def traffic(self, number: int, frontend: str = "f0", requests: int = 10, **more: Any) -> None:
        """Report the minute of this number after noon, at its end."""
        begin = NOON + number * MINUTE
        source = more.pop("source", "")
        body: dict[str, Any] = {
            "prompt_tokens": 100 * requests,
            "prompt_tokens_squared": 10_000 * requests,
            "output_tokens": 50 * requests,
        }
        body |= {"late": 0, "rejected": 0, **more}
        fact = TrafficReported(frontend=frontend, model="m", minute=begin, requests=requests, **body)
        self.say(fact, begin + MINUTE, source)

    def capacity(self, at: datetime, healthy: int) -> None:
        self.say(
            CapacityReported(
                planner="p", model="m", provisioned=healthy, healthy=healthy, lost=0, gpus=1, achievable_rps=1.0, ratio=1.0,
                position=1,
            ),
            at,
        )  # fmt: skip

    def seen(self, minutes: float) -> list[Seen]:
        """Return what is known this many minutes after noon."""
        return self.history.minutes(NOON + minutes * MINUTE)


def requests(seen: list[Seen]) -> list[float | None]:
    return [None if minute is None else minute.traffic.requests for minute in seen]


def test_a_minute_is_the_sum_of_all_frontends_reports() -> None:
    told = Told()
    told.traffic(0, "f0", 10, late=1)
    told.traffic(0, "f1", 5, late=2)
    assert told.seen(1) == [], "a report may still be on its way"
    assert told.seen(1.2) == [Minute(Traffic(15, 1500, 150_000, 750), 3)]


def test_a_minute_without_traffic_is_known() -> None:
    told = Told()
    told.traffic(0)
    told.traffic(1, requests=0)
    assert requests(told.seen(2.2)) == [10, 0]


def test_an_unreported_minute_is_not_one_without_traffic() -> None:
    told = Told()
    told.traffic(0)
    told.traffic(2)
    assert requests(told.seen(4.2)) == [10, None, 10, None]


def test_a_minute_is_unknown_while_a_frontend_is_missing() -> None:
    told = Told()
    for number in range(6):
        told.traffic(number, "f0")
        if number < 2:
            told.traffic(number, "f1")
    assert requests(told.seen(6.2)) == [20, 20, None, None, None, 10], "then it counts as gone"


def test_a_frontend_that_reports_its_stop_is_not_awaited() -> None:
    told = Told()
    told.traffic(0, "f0")
    told.traffic(0, "f1")
    told.traffic(1, "f0")
    told.traffic(1, "f1", 3, last=True)
    told.traffic(2, "f0")
    assert requests(told.seen(3.2)) == [20, 13, 10]


def test_both_lives_of_a_frontend_restarted_within_a_minute_count() -> None:
    told = Told()
    told.traffic(0, "f0", 4, last=True, source="f0:first")
    told.traffic(0, "f0", 3, source="f0:second")
    told.traffic(0, "f0", 3, source="f0:second")
    assert requests(told.seen(2.2)) == [7, None], "a report of its second life is awaited"


def test_rejected_requests_count_like_the_served_ones() -> None:
    told = Told()
    told.traffic(0, requests=10, rejected=5)
    told.traffic(1, requests=0, rejected=20)
    some, all_of_them = told.seen(2.2)
    assert some is not None and some.traffic == Traffic(15, 1500, 150_000, 750)
    assert all_of_them is not None and all_of_them.traffic == Traffic(20, 2000, 200_000, 1000)


def test_serving_workers_are_the_mean_over_the_minute() -> None:
    told = Told()
    told.traffic(0)
    told.traffic(1)
    told.capacity(NOON - MINUTE, 4)
    told.capacity(NOON + 0.5 * MINUTE, 8)
    assert [minute and minute.workers for minute in told.seen(2.2)] == [pytest.approx(6), pytest.approx(8)]


def test_changes_cover_the_last_hour_and_an_operators_number_holds_until_released() -> None:
    told = Told()
    for ago in (70, 50, 10):
        told.say(proposed(ago), NOON - ago * MINUTE)
    assert [change.after for change in told.history.changes(NOON)] == [50, 10]
    wishes = [told.history.set_by_operator]
    for workers, reason in ((7, "a launch"), (None, "it is over")):
        told.say(ScaleSet(model="m", workers=workers, by="op", reason=reason), NOON)
        wishes.append(told.history.set_by_operator)
    assert wishes == [None, 7, None]


def test_a_late_report_still_counts() -> None:
    told = Told()
    for number in range(20):
        if number != 7:
            told.traffic(number)
    assert requests(told.seen(20.2))[7] is None
    told.traffic(7)
    assert requests(told.seen(20.2)) == [10] * 20
    told.traffic(7, "f1", 5)
    assert requests(told.seen(20.2))[7:12] == [15, None, None, None, 10], (
        "that frontend was expected to continue"
    )


def test_one_week_is_remembered() -> None:
    told = Told()
    for number in range(MINUTES_MAX + 200):
        told.traffic(number)
    seen = told.seen(MINUTES_MAX + 200.2)
    assert requests(seen) == [10] * MINUTES_MAX


def proposed(after: int) -> ScaleProposed:
    return ScaleProposed(
        planner="p", model="m", before=1, after=after, why="up", needed=after, method="constant", error=None, bound="batch",
        held="", by="", position=1,
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc"), st.integers(0, 9)), max_size=60))
def test_no_report_of_a_known_minute_is_lost(lines: list[tuple[int, str, int]]) -> None:
    told, sums = Told(), dict[int, float]()
    heard = set()
    for number, frontend, count in sorted(lines):
        told.traffic(number, frontend, count)
        if (number, frontend) not in heard:
            heard.add((number, frontend))
            sums[number] = sums.get(number, 0) + count
    seen = requests(told.seen(40))
    first = min(sums, default=0)
    for place, total in enumerate(seen):
        assert total is None or total == sums[first + place]
