"""Every planted fault is found within 200 seeds, by an invariant that speaks of it."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from planted import PLANTED

from controller.simulator.simulation import Violation, simulate

SEEDS = 200
WORKERS = 5
MINUTES = 60.0
CHUNK = 2  # seeds played at once


@pytest.fixture(scope="module")
def cores() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(CHUNK, multiprocessing.get_context("fork")) as pool:
        yield pool


def play(name: str, seed: int) -> Violation | None:
    return simulate(seed, WORKERS, MINUTES, seams=PLANTED[name].seams).violation


def first_find(cores: ProcessPoolExecutor, name: str) -> Violation | None:
    """Play seeds, two at a time, until one breaks an invariant."""
    for seed in range(0, SEEDS, CHUNK):
        found = cores.map(play, [name] * CHUNK, range(seed, seed + CHUNK))
        if violation := next(filter(None, found), None):
            return violation
    return None


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found(cores: ProcessPoolExecutor, name: str) -> None:
    violation = first_find(cores, name)
    assert violation is not None, f"{PLANTED[name].says}: not found in {SEEDS} seeds"
    assert violation.invariant in PLANTED[name].found_by, violation


def test_planted_faults_are_of_at_least_eight_kinds() -> None:
    assert len({plant.found_by for plant in PLANTED.values()}) >= 8
