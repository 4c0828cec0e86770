"""Every feature over a move, on a real model with single-byte tokens, so that cuts divide characters."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make test-engines")
pytestmark = pytest.mark.engines

from move_contract import COUNT, Made, MoveContract, Pair, inside_characters  # noqa: E402


class TestTransformers(MoveContract):
    """Half the tiny model, with the same single bytes as the whole."""

    @pytest.fixture
    def made(self, engine_of: Callable[..., Any]) -> Made:
        return partial(engine_of, context_tokens=512)

    async def test_characters_survive_a_cut_inside_them(self, pair: Pair, small: Path) -> None:
        for seed in range(20):
            wild: dict[str, Any] = {"temperature": 2.0, "seed": seed}
            tokens = await self.tokens(pair.kit, **wild)
            inside = inside_characters(str(small), tokens)
            cuts = [place for place in inside if place < COUNT - pair.late][:3]
            pair.cuts.clear()
            if cuts:
                await self.same(pair, cuts, **wild)
            if set(pair.cuts) & set(inside):
                return
        raise AssertionError("no character of these answers was divided")
