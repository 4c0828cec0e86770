"""The tiny model, built once per session, and fixtures for engines."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from transports import Road

from events.observations import Profile

KNOWN = Profile(kv_blocks=1, block_tokens=32, max_batch=32, prefill_tokens_per_s=1.0, tpot_ms=((1, 1.0),))
MakeEngine = Callable[..., Any]


@pytest.fixture
def road() -> Road:
    """Directly to the worker: the path of its frames does not affect an engine."""
    return Road("tcp")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model."""
    pytest.importorskip("torch", reason="torch is not installed: make test-engines")
    return tiny_model.whole(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with half the tiny model."""
    pytest.importorskip("torch", reason="torch is not installed: make test-engines")
    return tiny_model.half(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tests run in parallel: each uses one core."""
    torch = pytest.importorskip("torch", reason="torch is not installed: make test-engines")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def engine_of(small: Path) -> MakeEngine:
    """Create engines with the given settings, with half the tiny model unless they name another one.

    Only the first engine of a kind checks its exactness, and later ones reuse the result: the check is nine tenths of a start,
    and test_transformers_model.py tests it.
    """
    from workers.engines.transformers.engine import TransformersEngine
    from workers.engines.transformers.model import make_exact
    from workers.engines.transformers.settings import TransformersSettings

    found: dict[tuple[Any, ...], tuple[bool, int]] = {}

    def made(**given: Any) -> TransformersEngine:
        settings = TransformersSettings(**{"folder": small, "profile": KNOWN, **given})

        def check(model: Any, pool: Any, blocks: Any) -> bool:
            kind = (settings.folder, settings.dtype, settings.threads, blocks.count, blocks.tokens)
            if kind not in found:
                found[kind] = make_exact(model, pool, blocks), model.tile
            exact, model.tile = found[kind]
            return exact

        return TransformersEngine(settings, check)

    return made
