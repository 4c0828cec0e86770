"""The style is a test: lint, format, types, who may import what, and whose names are ours."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
OURS = ("events", "controller", "workers")
FUNCTION_LINES_MAX = 40
FILE_LINES_MAX = 300
DEADLINE_S = 300.0


def run(*command: str) -> None:
    """Run a tool of the environment; show what it says if it is not content."""
    tool = BIN / command[0]
    ended = subprocess.run([tool, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout}\n{ended.stderr}"


def test_ruff_finds_nothing() -> None:
    run("ruff", "check", "--quiet", ".")


def test_ruff_would_format_nothing() -> None:
    run("ruff", "format", "--check", "--quiet", ".")


def test_mypy_finds_nothing() -> None:
    run("mypy")


def test_nobody_imports_what_he_may_not() -> None:
    run("lint-imports", "--no-cache")


def modules() -> Iterator[Path]:
    """Yield every source file of ours."""
    for package in OURS:
        yield from sorted((ROOT / package).rglob("*.py"))


CORE = ("fact", "observations", "decisions", "order", "subjects", "errors")


@pytest.mark.parametrize("name", CORE)
def test_the_facts_import_the_standard_library_only(name: str) -> None:
    allowed = {*sys.stdlib_module_names, "events"}
    assert imported(ROOT / "events" / f"{name}.py") <= allowed


@pytest.mark.parametrize("folder", ["deciders", "moving"])
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


def test_make_looks_for_tests_of_engines_where_they_are() -> None:
    command = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "-m engines" in line)
    looked = [ROOT / word for word in command.split() if word.startswith("tests/")]
    mark = "mark." + "engines"
    marked = [path for path in (ROOT / "tests").rglob("*.py") if mark in path.read_text()]
    assert (
        marked and [path for path in marked if not any(path.is_relative_to(there) for there in looked)] == []
    )


def test_our_top_level_names_are_ours_alone() -> None:
    """They are generic: another distribution of the same name in this environment would overwrite ours."""
    owners = packages_distributions()
    for name in OURS:
        assert set(owners.get(name, ["holdfast"])) == {"holdfast"}, f"{name} is also owned by {owners[name]}"
        assert Path(__import__(name).__file__ or "").parent == ROOT / name


def test_public_things_say_what_they_are() -> None:
    silent = [f"{path.relative_to(ROOT)}: {name}" for path in modules() for name in undocumented(path)]
    print(*silent, sep="\n")
    assert not [line for line in silent if line.startswith(("controller/deciders/", "controller/moving/"))]


def undocumented(path: Path) -> Iterator[str]:
    """Yield the module, and its public classes and functions, where they have no docstring."""
    tree = ast.parse(path.read_text())
    if tree.body and ast.get_docstring(tree) is None:
        yield "the module"
    for node in tree.body:
        definition = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if definition and not node.name.startswith("_") and ast.get_docstring(node) is None:
            yield node.name


def long_things() -> Iterator[str]:
    """Yield what is longer than we aim for: it is a warning, not an error."""
    for path in modules():
        text = path.read_text()
        where = path.relative_to(ROOT)
        if (lines := text.count("\n")) > FILE_LINES_MAX:
            yield f"{where}: {lines} lines (aim: {FILE_LINES_MAX})"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    yield f"{where}:{node.lineno}: {node.name} has {length} lines (aim: {FUNCTION_LINES_MAX})"


def test_long_functions_and_files_are_a_printed_warning(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(long_things())
    with capsys.disabled():
        for line in found:
            print(f"\nlong: {line}", end="")


if __name__ == "__main__":
    print(*long_things(), sep="\n")
