"""The number of workers that traffic needs: the queueing model compared with a simulated fleet."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.planner.fleet_model import FleetModel
from controller.planner.sizing import WORKERS_MAX, Objectives, Traffic, size, work
from events.observations import Profile

PROFILE = Profile(
    kv_blocks=40_000,
    block_tokens=16,
    max_batch=32,
    prefill_tokens_per_s=4000.0,
    tpot_ms=((1, 25.0), (32, 40.0)),
)
OBJECTIVES = Objectives(ttft_ms=1500.0, tpot_ms=80.0)

requests = st.lists(st.tuples(st.integers(1, 20_000), st.integers(1, 2000)), min_size=1, max_size=200)


def test_no_traffic_needs_no_worker() -> None:
    assert size(Traffic(), 60.0, PROFILE, OBJECTIVES).workers == 0


def test_a_request_needs_a_worker() -> None:
    assert size(Traffic.of([(100, 10)]), 60.0, PROFILE, OBJECTIVES).workers == 1


@given(requests, st.floats(1.0, 20.0))
def test_more_traffic_never_needs_fewer_workers(asked: list[tuple[int, int]], factor: float) -> None:
    traffic = Traffic.of(asked)
    less = size(traffic, 60.0, PROFILE, OBJECTIVES).workers
    assert 1 <= less <= size(traffic.times(factor), 60.0, PROFILE, OBJECTIVES).workers <= WORKERS_MAX


@given(requests)
def test_faster_workers_are_never_needed_in_greater_number(asked: list[tuple[int, int]]) -> None:
    fast = replace(PROFILE, prefill_tokens_per_s=8000.0, tpot_ms=((1, 12.5), (32, 20.0)))
    traffic = Traffic.of(asked).times(10)
    assert size(traffic, 60.0, fast, OBJECTIVES).workers <= size(traffic, 60.0, PROFILE, OBJECTIVES).workers


@pytest.mark.parametrize(
    ("change", "objectives", "bound"),
    [
        ({"max_batch": 2}, Objectives(ttft_ms=60_000, tpot_ms=1000), "batch"),
        ({"kv_blocks": 200}, Objectives(ttft_ms=60_000, tpot_ms=1000), "kv"),
        ({"tpot_ms": ((1, 1.0),)}, Objectives(ttft_ms=300, tpot_ms=1000), "first_token"),
        ({}, Objectives(ttft_ms=60_000, tpot_ms=40), "token_time"),
    ],
)
def test_the_bound_names_what_prevents_fewer_workers(
    change: dict[str, object], objectives: Objectives, bound: str
) -> None:
    traffic = Traffic.of([(1000, 200)] * 600)
    found = size(traffic, 60.0, replace(PROFILE, **change), objectives)  # type: ignore[arg-type]
    assert found.bound == bound and found.workers > 1


def test_a_time_per_token_that_no_worker_meets_alone_is_ignored() -> None:
    traffic = Traffic.of([(1000, 200)] * 60)
    found = size(traffic, 60.0, PROFILE, Objectives(ttft_ms=1500, tpot_ms=20))
    assert found == size(traffic, 60.0, PROFILE, Objectives(ttft_ms=1500, tpot_ms=1e9))


def test_traffic_that_no_number_could_serve_needs_the_maximum() -> None:
    assert size(Traffic.of([(10**6, 10)]).times(1e9), 60.0, PROFILE, OBJECTIVES).workers == WORKERS_MAX


@pytest.mark.slow
@pytest.mark.parametrize(
    ("per_s", "prompt", "answer", "objectives"),
    [
        (4.0, 1000, 200, OBJECTIVES),
        (20.0, 1000, 200, OBJECTIVES),
        (20.0, 1000, 20, Objectives(ttft_ms=500, tpot_ms=200)),
        (8.0, 4000, 300, Objectives(ttft_ms=3000, tpot_ms=100)),
    ],
)
def test_the_number_is_near_that_of_a_simulated_fleet(
    per_s: float, prompt: int, answer: int, objectives: Objectives
) -> None:
    """Lengths vary as widely as those of real requests (exponentially); arrivals are a Poisson process."""
    dice, at, came = random.Random(7), 0.0, []
    while at < 200.0:
        at += dice.expovariate(per_s)
        came.append((at, 1 + int(dice.expovariate(1 / prompt)), 1 + int(dice.expovariate(1 / answer))))
    traffic = Traffic.of([(asked, answered) for _, asked, answered in came])
    model = size(traffic, 200.0, PROFILE, objectives).workers
    too_few, enough = 0, 64
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if _missed(came, middle, objectives) <= objectives.missed:
            enough = middle
        else:
            too_few = middle
    assert model == pytest.approx(enough, rel=0.3, abs=1)


def _missed(came: list[tuple[float, int, int]], workers: int, objectives: Objectives) -> float:
    fleet = FleetModel(PROFILE, objectives, workers, 60.0)
    for at, asked, answered in came:
        fleet.come(at, asked, answered)
    return fleet.figures.missed_share


def test_a_simulated_fleet_may_grow_beyond_its_initial_size() -> None:
    fleet = FleetModel(PROFILE, OBJECTIVES, 100, 60.0)
    fleet.scale(300, 0.0)
    assert (fleet.workers, fleet.serving) == (300, 100)
    fleet.come(61.0, 100, 10)
    assert fleet.serving == 300


@given(requests)
def test_work_is_the_sum_of_its_parts(asked: list[tuple[int, int]]) -> None:
    whole = work(Traffic.of(asked), PROFILE)
    assert whole == pytest.approx(sum(work(Traffic.of([one]), PROFILE) for one in asked))
