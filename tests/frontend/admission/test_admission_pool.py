"""Admission by deadlines: the prediction for a request, and the decision that follows from it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.frontend.admission.pool import (
    ALONE_TIMES,
    IDS_MAX,
    IDS_S,
    MARGIN,
    MARGIN_MAX,
    MARGIN_MIN,
    REPEATS_LEAST,
    AdmissionVerdict,
    RefusedIds,
    RetryBudget,
    WorkerPool,
)
from controller.frontend.admission.queue import Line, QueuedRequest
from controller.router.load.work import (
    EXTRA_MAX_S,
    FACTOR_MAX,
    AnswerLengths,
    Demand,
    FirstTokens,
    reading_s,
    work_s,
)
from events.observations import Profile

PROFILE = Profile(
    kv_blocks=1000,
    block_tokens=16,
    max_batch=10,
    prefill_tokens_per_s=10_000,
    tpot_ms=((1, 10.0), (10, 20.0)),
)
WANTED = QueuedRequest("m", tier=1, client="b", deadline_s=1.0, work=1.0, reading_s=0.1)


def empty_pool() -> WorkerPool:
    return WorkerPool(Line(), FirstTokens(), 0.0)


def queued(
    number: int, tier: int, client: str, work: float, since: float = 0.0, latest: float = 99.0
) -> QueuedRequest:
    return QueuedRequest("m", None, tier, client, work, since, latest, number=number)


def pool_with(work: float, tier: int = 1, client: str = "b") -> WorkerPool:
    """Return a pool with this much work waiting in its queue."""
    pool = empty_pool()
    for number in range(int(work * 10)):
        pool.line.push(queued(number, tier, client, 0.1))
    return pool


def judged(
    pool: WorkerPool, asked: QueuedRequest, *, room: bool = False, capacity: float = 10.0
) -> AdmissionVerdict:
    return pool.judge(asked, 0.0, capacity, 0.0, room=room)


# --- work


def test_work_is_the_prefill_and_a_slot_in_the_batch() -> None:
    demand = Demand(unread=1000, prompt=1000, answer=100)
    assert reading_s(1000, PROFILE) == pytest.approx(0.1)
    assert work_s(demand, PROFILE, 10) == pytest.approx(0.1 + 100 * 0.020 / 10)


def test_cached_tokens_are_no_work() -> None:
    cold = Demand(unread=1000, prompt=1000, answer=10)
    assert work_s(cold, PROFILE, 10) - work_s(replace(cold, unread=0), PROFILE, 10) == pytest.approx(0.1)


def test_a_request_that_holds_half_of_the_cache_is_half_of_the_worker() -> None:
    demand = Demand(unread=0, prompt=8000, answer=100)
    share = (8000 + 50) / 16_000
    assert work_s(demand, PROFILE, 10) == pytest.approx(100 * 0.020 * share)


def test_several_answers_take_one_slot_each() -> None:
    one = Demand(unread=0, prompt=10, answer=100)
    assert work_s(replace(one, answers=4), PROFILE, 10) == pytest.approx(4 * work_s(one, PROFILE, 10))


def test_a_worker_that_registers_no_speed_counts_as_no_work() -> None:
    silent = Profile(kv_blocks=0, block_tokens=0, max_batch=0, prefill_tokens_per_s=0, tpot_ms=())
    assert work_s(Demand(unread=1000, prompt=1000), silent, 0) == 0.0


def test_answers_are_expected_to_be_as_long_as_recent_ones_within_their_maximum() -> None:
    lengths = AnswerLengths()
    assert lengths.expected("m", 64) == 64
    for _ in range(400):
        lengths.ended("m", 100)
    assert lengths.expected("m", 4096) == pytest.approx(100, rel=0.01)
    assert lengths.expected("m", 20) == 20
    assert lengths.expected("other", 4096) == 512


# --- first tokens


def test_a_worker_twice_as_slow_as_registered_is_predicted_accordingly() -> None:
    first = FirstTokens()
    for _ in range(100):
        first.came("slow", 0.0, 0.1, 0.01, 0.21)
        first.came("right", 0.0, 0.1, 0.01, 0.11)
    assert first.predicted_s("slow", 0.1, 0.1, 0.01) == pytest.approx(0.41, rel=0.02)
    assert first.predicted_s("right", 0.1, 0.1, 0.01) == pytest.approx(0.21, rel=0.02)
    unknown = first.predicted_s("new", 0.0, 0.1, 0.01)
    assert 0.11 < unknown < 0.21, "an unknown worker is predicted like all others"
    assert first.alone_s(0.1, 0.01) == pytest.approx(0.11, rel=0.02), "the fastest worker needs this time"
    for _ in range(100):
        first.came("right", 0.0, 0.1, 0.01, 0.16)
    assert first.alone_s(0.1, 0.01) == pytest.approx(0.16, rel=0.02), (
        "without the fastest worker it takes longer"
    )
    first.retain({"slow"})
    assert first.alone_s(0.1, 0.01) == pytest.approx(0.21, rel=0.02)
    first.retain({"right"})
    assert first.predicted_s("slow", 0.0, 0.1, 0.01) == first.predicted_s("new", 0.0, 0.1, 0.01)


def test_waits_of_short_prompts_say_nothing_about_long_ones() -> None:
    first = FirstTokens()
    for _ in range(100):
        first.came("w", 0.0, 0.001, 0.02, 0.08)
    assert first.predicted_s("w", 0.0, 0.001, 0.02) == pytest.approx(0.08, rel=0.02)
    assert first.predicted_s("w", 0.0, 1.0, 0.02) == pytest.approx(1.08, rel=0.02)
    assert first.alone_s(1.0, 0.02) == pytest.approx(1.02)


def test_the_work_ahead_is_a_mean() -> None:
    first = FirstTokens()
    for _ in range(100):
        first.sent(0.2)
    assert first.usual_s(0.1, 0.01) == pytest.approx(0.31, rel=0.01)


@pytest.mark.parametrize("took_s", [0.0, 1e9])
@pytest.mark.parametrize("own_s", [0.001, 0.1])
def test_measurements_out_of_bounds_are_ignored(own_s: float, took_s: float) -> None:
    first = FirstTokens()
    for _ in range(1000):
        first.came("w", 0.0, own_s, 0.0, took_s)
    predicted = first.predicted_s("w", 0.0, 1.0, 0.0)
    assert 0.999 / FACTOR_MAX < predicted < 1.001 * FACTOR_MAX + EXTRA_MAX_S


# --- the decision


def test_no_request_waits_while_there_is_room() -> None:
    found = judged(pool_with(0), WANTED, room=True)
    assert (found.reason, found.wait_s) == ("", 0.0)


def test_a_request_that_would_be_served_in_time_may_wait() -> None:
    found = judged(pool_with(4), WANTED)  # 4 before it, and half of its own work, at 10 a second
    assert found.reason == ""
    assert found.wait_s == pytest.approx(0.45)
    assert found.first_s == pytest.approx(0.55)
    assert found.latest_s == pytest.approx(0.9)


def test_a_request_that_would_be_late_is_refused_at_once_with_the_predicted_wait() -> None:
    found = judged(pool_with(10), WANTED)
    assert found.reason == "deadline"
    assert found.wait_s == pytest.approx(1.05)


def test_a_margin_of_the_deadline_is_kept_because_predictions_are_inexact() -> None:
    just, beyond = MARGIN - 0.1 - 0.06, MARGIN - 0.1 + 0.06
    assert judged(pool_with(10 * just), replace(WANTED, work=0.0)).reason == ""
    assert judged(pool_with(10 * beyond), replace(WANTED, work=0.0)).reason == "deadline"


def test_about_one_in_a_hundred_times_out_in_each_tier_independently() -> None:
    pool = empty_pool()
    late = served = 0
    for number in range(20_000):
        one = queued(number, 1, "b", 0.1)
        pool.arrived(one, 0.0)
        # the nearer to its deadline, the more likely it is late
        if number * 0.618034 % 1 < pool.margin(1) ** 6:
            late += 1
            pool.timed_out(one)
        else:
            served += 1
            pool.served(one)
    assert 0.005 < late / served < 0.02
    assert MARGIN_MIN < pool.margin(1) < MARGIN_MAX == pool.margin(0)
    assert pool.margin(2) == MARGIN, "each tier has its own margin"


def test_the_time_since_arrival_counts() -> None:
    assert judged(pool_with(4), replace(WANTED, since=-0.3)).reason == "deadline"


def test_worse_tiers_do_not_delay_a_request_and_better_ones_do() -> None:
    assert judged(pool_with(50, tier=2), WANTED).reason == ""
    assert judged(pool_with(50, tier=0), WANTED).reason == "deadline"


def test_expected_arrivals_of_better_tiers_delay_a_request() -> None:
    pool = pool_with(3)
    assert judged(pool, WANTED).reason == ""
    for step in range(1000):
        pool.arrived(queued(step, 0, "b", 0.08), step / 100)  # 8 of 10 per second
    assert pool.judge(WANTED, 10.0, 10.0, 0.0, room=False).reason == "deadline"


def test_a_deadline_that_no_worker_could_meet_is_refused_if_the_client_set_it() -> None:
    long = replace(WANTED, reading_s=3.0)
    assert judged(pool_with(0), replace(long, own_deadline=True), room=True).reason == "deadline_unattainable"
    usual = judged(pool_with(0), long, room=True)
    assert usual.reason == "" and usual.deadline_s == pytest.approx(ALONE_TIMES * 3.0)


def test_a_request_with_a_limit_on_its_queueing_time_does_not_wait_longer() -> None:
    assert judged(pool_with(4), replace(WANTED, line_s=0.4)).reason == "deadline"
    assert judged(pool_with(4), replace(WANTED, line_s=0.5)).reason == ""


def test_without_workers_no_request_may_wait() -> None:
    assert judged(pool_with(1), WANTED, capacity=0.0).reason == "deadline"


# --- repeats


def test_repeats_are_refused_above_a_fifth_of_the_fresh_requests() -> None:
    budget, passed = RetryBudget(0.2), 0
    for step in range(1000):
        now = step / 100
        budget.note(now, repeat=False)
        if not budget.used_up(now):
            budget.note(now, repeat=True)
            passed += 1
    assert passed == pytest.approx(200, abs=10)


def test_a_few_repeats_are_admitted_however_few_fresh_requests_there_are() -> None:
    budget, passed = RetryBudget(0.2), 0
    while not budget.used_up(0.0):
        budget.note(0.0, repeat=True)
        passed += 1
    assert passed == REPEATS_LEAST


def test_ids_of_refused_requests_are_remembered_for_a_while_and_bounded() -> None:
    ids = RefusedIds()
    ids.add("one", 0.0)
    ids.add("", 0.0)
    assert ids.recently_refused("one", IDS_S) and not ids.recently_refused("one", IDS_S + 1)
    assert not ids.recently_refused("", 0.0) and not ids.recently_refused("two", 0.0)
    for n in range(IDS_MAX):
        ids.add(str(n), 1.0)
    assert not ids.recently_refused("one", 1.0) and ids.recently_refused("0", 1.0)


# --- properties --------------------------------------------------------------------------------------------------------

SECONDS = st.floats(0.0, 5.0)
ASKED = st.builds(
    QueuedRequest,
    served=st.just("m"),
    tier=st.integers(0, 2),
    client=st.sampled_from("abc"),
    deadline_s=st.floats(0.05, 10.0),
    own_deadline=st.booleans(),
    work=st.floats(0.0, 3.0),
    reading_s=st.floats(0.0, 2.0),
    line_s=st.one_of(st.just(float("inf")), SECONDS),
)
STEPS = st.lists(
    st.tuples(ASKED, SECONDS, st.floats(0.0, 2.0), st.sampled_from(["stays", "served", "late"])), max_size=40
)


@given(STEPS, st.floats(0.1, 20.0))
def test_a_waiting_request_is_predicted_to_be_in_time_and_a_refused_one_has_a_reason(
    steps: list[tuple[QueuedRequest, float, float, str]], capacity: float
) -> None:
    pool = empty_pool()
    now = 0.0
    for number, (asked, waited_s, passes, then) in enumerate(steps):
        now += passes
        pool.capacity = capacity
        pool.pass_time(now)
        asked = replace(asked, number=number, since=now - waited_s)
        verdict = pool.judge(asked, now, capacity, 0.0, room=False)
        assert verdict.wait_s >= 0.0 and verdict.first_s >= now - asked.since
        assert MARGIN_MIN <= pool.margin(asked.tier) <= MARGIN_MAX
        better = pool.judge(replace(asked, tier=0), now, capacity, 0.0, room=False)
        assert better.wait_s <= verdict.wait_s, "no request waits longer in a better tier"
        if verdict.reason:
            assert (
                not verdict.in_time_with_room
                or verdict.first_s > pool.margin(asked.tier) * verdict.deadline_s
                or verdict.wait_s > asked.line_s
            )
            continue
        assert verdict.first_s <= pool.margin(asked.tier) * verdict.deadline_s
        asked.work, asked.since, asked.latest = max(asked.work, 1e-6), now, now + verdict.latest_s
        pool.line.push(asked)
        pool.arrived(asked, now)
        head = pool.line.head(now)
        assert head is not None and all(head.tier <= other.tier for other in pool.line)
        if then != "stays":
            pool.line.remove(head, served=then == "served")
            (pool.served if then == "served" else pool.timed_out)(head)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 0.5)), max_size=200), st.floats(0.0, 1.0))
def test_admitted_repeats_stay_within_their_share(come: list[tuple[bool, float]], share: float) -> None:
    budget, now, fresh, again = RetryBudget(share), 0.0, 0, 0
    for repeat, passes in come:
        now += passes
        if repeat and budget.used_up(now):
            continue
        budget.note(now, repeat=repeat)
        fresh, again = fresh + (not repeat), again + repeat
    assert again <= max(REPEATS_LEAST * (1 + now / 5), share * fresh + REPEATS_LEAST * (1 + now / 5))
