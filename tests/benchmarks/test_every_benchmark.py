"""Every benchmark can be imported, so none breaks unnoticed when a name that it uses moves."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BRINGS = {  # packages that not every environment has
    "torch": "make test-engines",
    "transformers": "make test-engines",
    "nixl": "make test-nixl",
    "dynamo": "make peer",
    "matplotlib": "make install",
}
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
        if (error.name or "").partition(".")[0] not in BRINGS:
            raise
        pytest.skip(f"needs {error.name}, which `{BRINGS[(error.name or '').partition('.')[0]]}` installs")
