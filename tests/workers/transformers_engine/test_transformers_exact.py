"""A moved answer on a real model: identical tokens at the frontend, identical logits in the engine."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make test-engines")
pytestmark = pytest.mark.engines

from benchmarks.failures import exact  # noqa: E402
from benchmarks.serving.inside import METHODS  # noqa: E402


@pytest.fixture
def made(engine_of: Callable[..., Any], tiny: Path) -> exact.Made:
    """Engines of the whole tiny model."""
    return partial(engine_of, folder=tiny, context_tokens=1024, kv_tokens=32_768, profile=exact.KNOWN)


@pytest.mark.parametrize("method", METHODS)
async def test_sampled_streams_that_move_twice_equal_the_undisturbed_ones(
    method: str, made: exact.Made
) -> None:
    found = await exact.sampling(made, method, 8, seed=5)
    assert (found["identical"], found["moved"], found["wrong"]) == (8, 8, 0), found


@pytest.mark.parametrize("method", METHODS)
async def test_the_logits_after_a_cut_are_the_same_bits(method: str, made: exact.Made) -> None:
    found = await exact.continuation(made, method, 8, 3, seed=5)
    assert (found["cuts"], found["wrong"], found["blocks kept"]) == (24, 0, 0), found
    assert found["logits compared"] > 24 * 8
