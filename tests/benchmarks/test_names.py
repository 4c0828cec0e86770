"""`python -m benchmarks`: pages name only existing benchmarks, and missing packages are named."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from workers.engines.torch_missing import TorchMissing

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "benchmarks/README.md")


def test_pages_name_only_existing_benchmarks() -> None:
    pages = [*(ROOT / name for name in PAGES), *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    named = set(re.findall(r"python -m benchmarks (?!NAME)(\w+)", text))
    assert named and named <= benchmarks.KNOWN.keys()


def test_help_gives_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.main(["--help"]) == 0
    assert "relay, planes, faults" in capsys.readouterr().out


def test_without_torch_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise TorchMissing("torch is not installed")

    monkeypatch.setattr(benchmarks, "require_torch", missing)
    assert benchmarks.main(["sdc", "--help"]) == 1
    assert capsys.readouterr().err == "sdc: torch is not installed\n"


def test_a_benchmark_replaces_the_command_so_that_ctrl_c_leaves_it_time_to_stop_its_fleet() -> None:
    became: list[list[str]] = []
    benchmarks.main(["walk", "--seed", "3"], lambda program, arguments: became.append([program, *arguments]))
    walk = ["-m", "benchmarks.failures.walk", "--seed", "3"]
    assert became == [[sys.executable, sys.executable, *walk]]
