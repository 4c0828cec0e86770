"""Sampled canaries detect a sampler-only fault of the transformers engine."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make test-engines")
pytestmark = pytest.mark.engines

from probed_engines import a_broken_sampler_alone_is_found, probed  # noqa: E402

from workers.engines.engine import Engine  # noqa: E402

SHARPER = 30.0  # factor on the logits: a model with random weights finds all tokens about equally likely


def sharpen(engine: Engine) -> None:
    assert engine.chaos("drift", SHARPER)


async def test_a_sampled_canary_finds_a_sampler_only_fault_of_the_transformers_engine(
    engine_of: Callable[..., Any],
) -> None:
    engines = engine_of(context_tokens=512), engine_of(context_tokens=512)
    async with probed(*engines, within_s=120.0, prepare=sharpen) as fleet:
        await a_broken_sampler_alone_is_found(fleet, within_s=120.0)
