"""No benchmark is left behind when a name that it uses moves: each can at least be imported."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = {"torch", "transformers", "nixl", "dynamo", "matplotlib"}  # not in every environment
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if not path.name.startswith("__")
)


@pytest.mark.parametrize("module", MODULES)
def test_it_can_be_imported(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        pytest.skip(f"needs {error.name}")
