"""Every planted fault is found within 200 seeds, by an invariant that describes it."""

import pytest
from planted import PLANTED, Planted
from planted_requests import PLANTED_REQUESTS, REFUSALS

from controller.simulator.checks.watch import Violation
from controller.simulator.simulation import SweepRun

pytestmark = pytest.mark.seeds

SEEDS = 200
WORKERS = 5
MINUTES = 60.0
PLAYED = PLANTED | REFUSALS


def first_find(plant: Planted, *, live_requests: bool = False) -> Violation | None:
    """Run seeds until one violates an invariant."""
    found = (
        SweepRun(seed, WORKERS, MINUTES, live_requests=live_requests).play(plant.seams).violation
        for seed in range(plant.first_seed, plant.first_seed + SEEDS)
    )
    return next(filter(None, found), None)


@pytest.mark.parametrize("name", PLAYED)
def test_planted_fault_is_found(name: str) -> None:
    violation = first_find(PLAYED[name])
    assert violation is not None, f"{PLAYED[name].says}: not found in {SEEDS} seeds"
    assert violation.invariant in PLAYED[name].found_by, violation


@pytest.mark.parametrize("name", PLANTED_REQUESTS)
def test_planted_fault_of_the_request_machine_is_found(name: str) -> None:
    violation = first_find(PLANTED_REQUESTS[name], live_requests=True)
    assert violation is not None, f"{PLANTED_REQUESTS[name].says}: not found in {SEEDS} seeds"
    assert violation.invariant in PLANTED_REQUESTS[name].found_by, violation


def test_planted_faults_are_of_at_least_eight_kinds() -> None:
    assert len({plant.found_by for plant in PLAYED.values()}) >= 8
    assert len({plant.found_by for plant in PLANTED_REQUESTS.values()}) >= 8
