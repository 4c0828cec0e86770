"""How fast is a line served? Learned while somebody waits, and never else."""

import pytest

from controller.frontend.admission.pool import FADES_S, LEAST, MOST, WINDOW_S, DrainRate, Inflow


def serve(drain: DrainRate, since: float, seconds: float, rate: float, capacity: float) -> float:
    """Take so much work a second out of a line that never ends. Return when it is over."""
    steps = int(seconds * 100)
    for step in range(1, steps + 1):
        drain.pass_time(since + step / 100, capacity, waited=True)
        drain.take(rate / 100)
    return since + seconds


def test_the_first_guess_is_that_each_worker_does_a_second_in_a_second() -> None:
    assert DrainRate(0.0).rate(8.0) == 8.0


def test_what_is_taken_while_somebody_waits_is_the_rate() -> None:
    drain = DrainRate(0.0)
    serve(drain, 0.0, 40.0, rate=2.4, capacity=4.0)
    assert drain.rate(4.0) == pytest.approx(2.4, rel=0.05)


def test_while_nobody_waits_nothing_is_learned_and_what_is_known_fades_slowly() -> None:
    drain = DrainRate(0.0)
    until = serve(drain, 0.0, 40.0, rate=2.0, capacity=4.0)
    before = drain.rate(4.0)
    drain.pass_time(until + FADES_S, 4.0, waited=False)
    assert drain.rate(4.0) == pytest.approx(before, rel=0.1)
    drain.pass_time(until + 20 * FADES_S, 4.0, waited=False)
    assert drain.rate(4.0) == pytest.approx(4.0, rel=0.01), "the first guess"


def test_a_worker_that_falls_takes_its_part_with_it_at_once() -> None:
    drain = DrainRate(0.0)
    serve(drain, 0.0, 40.0, rate=4.0, capacity=4.0)
    assert drain.rate(3.0) == pytest.approx(3.0, rel=0.05)


def test_an_efficiency_stays_within_bounds_whatever_is_taken() -> None:
    drain = DrainRate(0.0)
    serve(drain, 0.0, 60.0, rate=0.0, capacity=4.0)
    assert drain.rate(1.0) == LEAST
    drain.take(1e9)
    drain.pass_time(61.0, 4.0, waited=True)
    assert drain.rate(1.0) == MOST


def test_time_that_goes_back_changes_nothing() -> None:
    drain = DrainRate(10.0)
    drain.pass_time(5.0, 4.0, waited=True)
    assert drain.rate(4.0) == 4.0


def test_what_comes_in_a_second_is_a_mean_of_the_last_ones() -> None:
    flow = Inflow()
    for step in range(6000):
        flow.add(0.03, step / 100)
    assert flow.rate(60.0) == pytest.approx(3.0, rel=0.02)
    assert flow.rate(60.0 + 10 * WINDOW_S) < 0.001
