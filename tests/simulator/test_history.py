"""A seed gives the same history byte for byte, in any process and under any hash seed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller.simulator.simulation import SweepRun

ROOT = Path(__file__).parents[2]


def dump(to: Path, hash_seed: str, seed: int = 6, workers: int = 6, minutes: int = 40) -> bytes:
    """Run a seed in its own process and return its history."""
    subprocess.run(
        [sys.executable, "-m", "controller.simulator", "--seed", str(seed), "--workers", str(workers),
         "--minutes", str(minutes), "--dump", str(to)],
        check=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, timeout=120,
    )  # fmt: skip
    return to.read_bytes()


@pytest.mark.slow
def test_a_seed_gives_the_same_bytes_in_two_processes_with_different_hash_seeds(tmp_path: Path) -> None:
    one, other = dump(tmp_path / "one", "1"), dump(tmp_path / "other", "4242")
    assert len(one) > 100_000
    assert one == other


@pytest.mark.slow
def test_two_crowded_models_give_the_same_bytes_under_different_hash_seeds(tmp_path: Path) -> None:
    one, other = (dump(tmp_path / seed, seed, 2, 5, 60) for seed in ("13", "14"))
    assert one == other


@pytest.mark.slow
def test_seeds_differ() -> None:
    digests = {SweepRun(seed, 3, 5.0).play().digest for seed in range(4)}
    assert len(digests) == 4


@pytest.mark.slow
def test_a_run_leaves_nothing_behind_that_changes_the_next() -> None:
    assert SweepRun(2, 3, 10.0).play().digest == SweepRun(2, 3, 10.0).play().digest


@pytest.mark.slow
def test_the_simulator_is_much_faster_than_time() -> None:
    """Catches a slowdown by an order of magnitude; the exact figure is measured in benchmarks."""
    assert SweepRun(1, 16, 30.0).play().speed > 60
