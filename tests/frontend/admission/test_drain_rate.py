"""The drain rate of a queue is measured only while requests wait."""

import pytest

from controller.frontend.admission.pool import FADES_S, LEAST, MOST, WINDOW_S, DrainRate, Inflow


def serve(drain: DrainRate, since: float, seconds: float, rate: float, capacity: float) -> float:
    """Serve this much work per second from an endless queue. Return the time at the end."""
    steps = int(seconds * 100)
    for step in range(1, steps + 1):
        drain.pass_time(since + step / 100, capacity, waited=True)
        drain.take(rate / 100)
    return since + seconds


def test_the_first_guess_is_one_second_of_work_per_worker_and_second() -> None:
    assert DrainRate(0.0).rate(8.0) == 8.0


def test_work_served_while_requests_wait_is_the_rate() -> None:
    drain = DrainRate(0.0)
    serve(drain, 0.0, 40.0, rate=2.4, capacity=4.0)
    assert drain.rate(4.0) == pytest.approx(2.4, rel=0.05)


def test_nothing_is_learned_while_no_request_waits_and_the_estimate_decays_slowly() -> None:
    drain = DrainRate(0.0)
    until = serve(drain, 0.0, 40.0, rate=2.0, capacity=4.0)
    before = drain.rate(4.0)
    drain.pass_time(until + FADES_S, 4.0, waited=False)
    assert drain.rate(4.0) == pytest.approx(before, rel=0.1)
    drain.pass_time(until + 20 * FADES_S, 4.0, waited=False)
    assert drain.rate(4.0) == pytest.approx(4.0, rel=0.01), "the first guess"


def test_a_worker_that_leaves_reduces_the_rate_at_once() -> None:
    drain = DrainRate(0.0)
    serve(drain, 0.0, 40.0, rate=4.0, capacity=4.0)
    assert drain.rate(3.0) == pytest.approx(3.0, rel=0.05)


def test_the_efficiency_stays_within_bounds() -> None:
    drain = DrainRate(0.0)
    serve(drain, 0.0, 60.0, rate=0.0, capacity=4.0)
    assert drain.rate(1.0) == LEAST
    drain.take(1e9)
    drain.pass_time(61.0, 4.0, waited=True)
    assert drain.rate(1.0) == MOST


def test_a_clock_that_goes_backwards_changes_nothing() -> None:
    drain = DrainRate(10.0)
    drain.pass_time(5.0, 4.0, waited=True)
    assert drain.rate(4.0) == 4.0


def test_the_inflow_per_second_is_a_recent_mean() -> None:
    flow = Inflow()
    for step in range(6000):
        flow.add(0.03, step / 100)
    assert flow.rate(60.0) == pytest.approx(3.0, rel=0.02)
    assert flow.rate(60.0 + 10 * WINDOW_S) < 0.001
