"""Every invariant holds in 200 seeds of a virtual hour, and in seeds that once violated one.

`make test-seeds` runs them all; the variable SEEDS changes their number. `make test-slow` runs half an hour of the first ones.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from controller.simulator.simulation import SweepRun, sweep

SEEDS = int(os.environ.get("SEEDS", "200"))
SHARE = 20  # seeds per test, so that tests can run in parallel
FIRST = 4  # run by `make test-slow`, half an hour of each
LIVE_MINUTES = 30.0  # an hour with live requests takes 1.4 times as long
FOUND = Path(__file__).with_name("seeds.txt")


def broken(runs: Iterable[SweepRun]) -> list[str]:
    """Run these and return the violations, each with the command that reproduces it.

    They run in this process: the tests run in parallel, and starting another process costs as much as a seed.
    """
    found, runs = [], [*runs]
    for run, result in zip(runs, sweep(runs, 1), strict=True):
        if (seen := result.violation) is not None:
            found.append(f"{run.command}\n    {seen.invariant} at {seen.at_s:.3f} s: {seen.detail}")
    return found


def once_broken() -> list[SweepRun]:
    """Return the runs of seeds.txt: seed, workers, minutes, `live` for live requests, then the cause."""
    lines = [line.partition("#")[0].split() for line in FOUND.read_text().splitlines()]
    return [
        SweepRun(int(seed), int(workers), float(minutes), live_requests=live == ["live"])
        for seed, workers, minutes, *live in filter(None, lines)
    ]


def played(seeds: range, minutes: float, *, live_requests: bool = False) -> None:
    runs = (SweepRun(seed, 3 + seed % 3, minutes, live_requests=live_requests) for seed in seeds)
    found = broken(runs)
    assert not found, "\n".join(["add these to seeds.txt:", *found])


@pytest.mark.seeds
@pytest.mark.parametrize("first", range(0, SEEDS, SHARE))
def test_every_invariant_holds_in_200_seeds_of_an_hour(first: int) -> None:
    played(range(first, first + SHARE), 60.0)


@pytest.mark.seeds
@pytest.mark.parametrize("first", range(0, SEEDS, SHARE))
def test_every_invariant_holds_in_200_seeds_with_live_requests(first: int) -> None:
    played(range(first, first + SHARE), LIVE_MINUTES, live_requests=True)


@pytest.mark.slow
@pytest.mark.parametrize("live_requests", [False, True])
def test_every_invariant_holds_in_the_first_seeds(live_requests: bool) -> None:
    played(range(FIRST), 30.0, live_requests=live_requests)


@pytest.mark.seeds
def test_seeds_that_once_broke_an_invariant_hold() -> None:
    runs = once_broken()
    assert runs
    assert not (found := broken(runs)), "\n".join(found)


@pytest.mark.seeds
@pytest.mark.parametrize("seed", [3, 7])
def test_a_full_fleet_of_two_models_holds(seed: int) -> None:
    assert not (found := broken([SweepRun(seed, 16, 60.0)])), "\n".join(found)


@pytest.mark.seeds
def test_fleets_of_one_and_two_workers_hold() -> None:
    runs = [SweepRun(seed, 1 + seed % 2, 60.0) for seed in range(10)]
    assert not (found := broken(runs)), "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("rates", ["llama3", "stepfun-2024"])
def test_faults_in_the_mix_of_a_field_study_hold(rates: str) -> None:
    assert not (found := broken([SweepRun(5, 6, 30.0, rates)])), "\n".join(found)
