"""Checks the style: lint, format, types, import contracts, and unique top-level names."""

import ast
import re
import shlex
import subprocess
import sys
from importlib.metadata import packages_distributions
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
OURS = ("events", "controller", "workers")
DEADLINE_S = 300.0


def run(*command: str) -> None:
    """Run a tool of the environment; show its output if it fails."""
    tool = BIN / command[0]
    ended = subprocess.run([tool, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout}\n{ended.stderr}"


def test_ruff_finds_nothing() -> None:
    run("ruff", "check", "--quiet", ".")


def test_ruff_would_format_nothing() -> None:
    run("ruff", "format", "--check", "--quiet", ".")


@pytest.mark.slow
def test_mypy_finds_nothing() -> None:
    run("mypy")


def test_mypy_checks_each_conftest() -> None:
    """mypy checks one module of each name: it finds the other `conftest` modules by their full names."""
    tests = ROOT / "tests"
    listed = re.findall(r"^import (\S+)$", (tests / "every_conftest.py").read_text(), re.MULTILINE)
    found = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in tests.rglob("conftest.py")}
    assert {*listed} == found - {"tests.conftest"}


def test_the_import_contracts_hold() -> None:
    run("lint-imports", "--no-cache")


CORE = ("fact", "observations", "decisions", "order", "subjects", "errors", "grammar")


@pytest.mark.parametrize("name", CORE)
def test_the_facts_import_the_standard_library_only(name: str) -> None:
    allowed = {*sys.stdlib_module_names, "events"}
    module = ROOT / "events" / name
    files = sorted(module.glob("*.py")) if module.is_dir() else [module.with_suffix(".py")]
    for path in files:
        assert imported(path) <= allowed, path.name


@pytest.mark.parametrize("folder", ["deciders", "migration", "frontend/openai/tools"])
def test_the_pure_folders_import_the_standard_library_and_the_facts_only(folder: str) -> None:
    allowed = {*sys.stdlib_module_names, "events", "controller"}
    for path in sorted((ROOT / "controller" / folder).glob("*.py")):
        assert imported(path) <= allowed, path.name


def imported(path: Path) -> set[str]:
    """Return the top-level names of everything that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("mark", ["engines", "attack", "seeds"])
def test_ci_runs_each_file_of_marked_tests(mark: str) -> None:
    """`make test` leaves marked tests out: another target of `.ci/run` must name their files."""
    (targets,) = re.findall(r"^for target in (.*); do$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    made = subprocess.run(
        ["make", "-n", *targets.split()], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    commands = [line for line in made.stdout.replace("\\\n", " ").splitlines() if "-m pytest" in line]
    assert len(commands) == len(targets.split())
    looked: list[Path] = []
    for words in map(shlex.split, commands):
        chosen = words[words.index("-m", 3) + 1] if "-m" in words[3:] else mark
        if re.search(rf"(?<!not )\b{mark}\b", chosen):
            looked += [
                ROOT / word
                for before, word in pairwise(words)
                if word.startswith("tests/") and before != "--ignore"
            ]
    use = "mark." + mark
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if use in path.read_text()]
    assert (
        marked and [path for path in marked if not any(path.is_relative_to(there) for there in looked)] == []
    )


def test_our_top_level_names_are_ours_alone() -> None:
    """They are generic: another distribution of the same name in this environment would overwrite ours."""
    owners = packages_distributions()
    for name in OURS:
        assert set(owners.get(name, ["holdfast"])) == {"holdfast"}, f"{name} is also owned by {owners[name]}"
        assert Path(__import__(name).__file__ or "").parent == ROOT / name
