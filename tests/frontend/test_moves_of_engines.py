"""Every feature over a move, on the simulated engine. Its tokens are whole characters: what befalls divided ones is
seen in `test_migration.py`, and on a real model in `tests/engines`."""

import pytest
from move_contract import Made, MoveContract

from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import Shape


class TestSimulated(MoveContract):
    """Flat out."""

    @pytest.fixture
    def made(self) -> Made:
        return lambda: SimulatedEngine(Shape(context_tokens=2048, kv_blocks=512))
