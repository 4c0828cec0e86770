"""Dozens of moved answers equal the undisturbed ones.

`benchmarks/failures/exact.py` does the same with hundreds.
"""

import pytest

from benchmarks.failures import exact
from benchmarks.serving.inside import METHODS


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
async def test_sampled_streams_that_move_twice_equal_the_undisturbed_ones(method: str) -> None:
    found = await exact.sampling(exact.simulated, method, 32, seed=5)
    assert (found["identical"], found["moved"], found["wrong"]) == (32, 32, 0), found


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
async def test_an_engine_continues_what_another_one_has_begun(method: str) -> None:
    found = await exact.continuation(exact.simulated, method, 32, 3, seed=5)
    assert (found["cuts"], found["wrong"], found["blocks kept"]) == (96, 0, 0), found
