"""docs/asyncapi.yaml is read by AsyncAPI's own parser, which is the Studio's, without a complaint."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from controller.catalogue import entries

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".asyncapi"
DOCUMENT = ROOT / "docs" / "asyncapi.yaml"
ERROR = 0  # a severity
LISTED = {"asyncapi-latest-version"}
"""What it may say: FastStream writes AsyncAPI 3.0.0, and there is 3.1.0."""


def read(file: Path) -> dict[str, Any]:
    """Return the channels that the parser finds, and its diagnostics; skip where it is not installed."""
    if shutil.which("node") is None or not (INSTALLED / ".installed").exists():
        pytest.skip(
            "AsyncAPI's parser is not installed: `make asyncapi` brings it, where Node.js and npm are there"
        )
    script = Path(__file__).with_name("asyncapi_diagnostics.cjs")
    done = subprocess.run(
        ["node", script, INSTALLED, file], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_parser_has_nothing_to_say_against_the_document() -> None:
    found = read(DOCUMENT)
    said = [
        f"{one['code']} at {'.'.join(map(str, one['path']))}: {one['message']}"
        for one in found["diagnostics"]
        if one["code"] not in LISTED
    ]
    assert said == []
    kinds = {entry.kind for entry in entries()}
    assert {address.rpartition(".")[2] for address in found["channels"]} >= kinds


def test_it_would_say_so(tmp_path: Path) -> None:
    (broken := tmp_path / "broken.yaml").write_text(
        DOCUMENT.read_text().replace("action: send", "action: shout", 1)
    )
    assert ERROR in {one["severity"] for one in read(broken)["diagnostics"]}
