"""AsyncAPI's own parser, which the Studio uses, accepts our document without diagnostics."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from controller.catalogue import entries

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".asyncapi"
DOCUMENT = ROOT / "docs" / "reference" / "asyncapi.yaml"
ERROR = 0  # a severity
LISTED = {"asyncapi-latest-version"}
"""The accepted diagnostics: FastStream writes AsyncAPI 3.0.0, and 3.1.0 exists."""


def read(file: Path) -> dict[str, Any]:
    """Return the channels that the parser finds, and its diagnostics; skip if it is not installed."""
    if shutil.which("node") is None or not (INSTALLED / ".installed").exists():
        pytest.skip("AsyncAPI's parser is not installed: run `make asyncapi`, which needs Node.js and npm")
    script = Path(__file__).with_name("asyncapi_diagnostics.cjs")
    done = subprocess.run(
        ["node", script, INSTALLED, file], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_the_parser_accepts_the_document() -> None:
    found = read(DOCUMENT)
    said = [
        f"{one['code']} at {'.'.join(map(str, one['path']))}: {one['message']}"
        for one in found["diagnostics"]
        if one["code"] not in LISTED
    ]
    assert said == []
    kinds = {entry.kind for entry in entries()}
    assert {address.rpartition(".")[2] for address in found["channels"]} >= kinds


@pytest.mark.slow
def test_the_parser_rejects_a_broken_document(tmp_path: Path) -> None:
    (broken := tmp_path / "broken.yaml").write_text(
        DOCUMENT.read_text().replace("action: send", "action: shout", 1)
    )
    assert ERROR in {one["severity"] for one in read(broken)["diagnostics"]}
