"""Latency baselines of canaries."""

import random

from controller.runtime.canary.canary_set import Baseline


def warmed(*workers: str, ms: float = 100.0, samples: int = 10) -> Baseline:
    baseline = Baseline()
    for worker in workers:
        for _ in range(samples):
            assert baseline.judge(worker, "1", ms) is None
    return baseline


def test_b13_a_cold_first_sample_is_not_the_baseline() -> None:
    baseline = Baseline()
    assert baseline.judge("w", "1", 5_000.0) is None
    for _ in range(6):
        assert baseline.judge("w", "1", 100.0) is None
    assert baseline.of("w") == 100.0
    assert baseline.judge("w", "1", 400.0) == 100.0


def test_b13_a_worker_that_slows_by_2_5_each_step_is_caught() -> None:
    for names in (("w",), ("w", "a", "b", "c")):
        baseline = warmed(*names)
        latency, caught = 100.0, 0
        for _ in range(4):
            latency *= 2.5
            caught += baseline.judge("w", "1", latency) is not None
        assert caught == 3, names  # all but the first step, which is below three times


def test_b13_a_worker_that_creeps_is_caught_alone_too() -> None:
    baseline = warmed("w")
    latency = 100.0
    for _ in range(200):
        latency *= 1.05
        if baseline.judge("w", "1", latency) is not None:
            break
    assert latency < 100.0 * 1.5 * 3 * 1.05


def test_a_fleet_that_is_busy_together_is_not_slow() -> None:
    baseline = warmed("a", "b", "c", "d")
    accused = 0
    for step in range(60):
        for worker in "abcd":
            accused += baseline.judge(worker, "1", 100.0 + 10.0 * step) is not None
    assert accused == 0


def test_a_worker_that_was_slow_from_its_start_is_compared_with_its_peers() -> None:
    baseline = warmed("a", "b", "c")
    assert baseline.judge("new", "1", 900.0) is None  # cold
    assert baseline.judge("new", "1", 900.0) == 100.0


def test_an_excess_of_milliseconds_only_is_not_slow() -> None:
    baseline = warmed("a", "b", "c", ms=2.0)
    assert baseline.judge("a", "1", 40.0) is None
    assert baseline.judge("a", "1", 60.0) == 2.0


def test_noise_alone_is_never_slow_three_times_in_a_row() -> None:
    draw = random.Random(3)
    baseline, in_a_row = Baseline(), 0
    for _ in range(5_000):
        slow = baseline.judge("w", "1", 100.0 * draw.lognormvariate(0, 0.3)) is not None
        in_a_row = in_a_row + 1 if slow else 0
        assert in_a_row < 3


def test_a_new_instance_starts_without_a_baseline() -> None:
    baseline = warmed("w")
    assert baseline.judge("w", "2", 1_000.0) is None
    assert baseline.of("w") is None


def test_a_worker_that_is_gone_is_no_peer() -> None:
    baseline = warmed("a", "b", "c")
    baseline.forget(["b", "c", "absent"])
    assert baseline.judge("a", "1", 250.0) is None
    assert baseline.of("a") == 100.0


def test_a_worker_is_compared_with_peers_of_the_same_load() -> None:
    baseline = warmed("a", "b", "c")
    for _ in range(10):
        for worker in "ab":
            assert baseline.judge(worker, "1", 320.0, load=60) is None, "a full batch takes longer"
    assert baseline.of("c", load=40) == 320.0
    assert baseline.of("c", load=1) == 100.0
    assert baseline.judge("c", "1", 900.0, load=50) is None
    assert baseline.judge("c", "1", 1000.0, load=50) == 320.0


def test_a_lone_worker_may_take_longer_at_a_new_load_level_within_bounds() -> None:
    baseline = warmed("w")
    assert baseline.judge("w", "1", 400.0, load=4) is None
    assert baseline.judge("w", "1", 700.0, load=4) == 225.0
    assert baseline.judge("w", "1", 400.0, load=1) == 100.0, "without load the same latency is slow"


def test_if_most_workers_become_slow_at_once_none_is_blamed() -> None:
    baseline, accused = warmed("a", "b", "c", "d"), dict.fromkeys("abcd", 0)
    for _ in range(20):
        for worker in "abcd":
            accused[worker] += baseline.judge(worker, "1", 900.0) is not None
    assert max(accused.values()) == 1, (
        "the first ones probed are suspected once; it takes three in a row for a verdict"
    )


def test_one_of_two_slow_workers_among_four_is_still_found() -> None:
    baseline, accused = warmed("a", "b", "c", "d"), dict.fromkeys("abcd", 0)
    for _ in range(5):
        for worker in "abcd":
            accused[worker] += baseline.judge(worker, "1", 900.0 if worker in "ab" else 100.0) is not None
    assert accused == {"a": 5, "b": 5, "c": 0, "d": 0}
