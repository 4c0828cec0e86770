"""Every planted fault is found within 200 seeds, by an invariant that speaks of it."""

import pytest
from planted import PLANTED

from controller.simulator.checks.watch import Violation
from controller.simulator.simulation import simulate

pytestmark = pytest.mark.seeds

SEEDS = 200
WORKERS = 5
MINUTES = 60.0


def first_find(name: str) -> Violation | None:
    """Play seeds until one breaks an invariant: from 2 on, in which much happens, so that few are played."""
    found = (
        simulate(seed, WORKERS, MINUTES, seams=PLANTED[name].seams).violation for seed in range(2, 2 + SEEDS)
    )
    return next(filter(None, found), None)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found(name: str) -> None:
    violation = first_find(name)
    assert violation is not None, f"{PLANTED[name].says}: not found in {SEEDS} seeds"
    assert violation.invariant in PLANTED[name].found_by, violation


def test_planted_faults_are_of_at_least_eight_kinds() -> None:
    assert len({plant.found_by for plant in PLANTED.values()}) >= 8
