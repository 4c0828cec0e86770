"""The architecture page: its diagram shows the contracts' layers, and its walks follow the imports."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import grimp
import pytest
from architecture_page import renewed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
STEP = re.compile(
    r"^(?P<indent> *)(?:\d+\.|-) (?:(?P<arrow>[→←⇢⇒]) )?`(?P<file>[\w/]+\.py)`(?: \((?P<by>[^)]*)\))?: ",
    re.MULTILINE,
)
BY = re.compile(r"^(?P<its>its )?(?:`(?P<name>\w+)` of )?`(?P<file>[\w/]+\.py)`$")


class Step(NamedTuple):
    """One file of a walk, and how it is reached from another one."""

    walk: str
    before: str  # the file that it is reached from; "" at the beginning of a walk
    arrow: str
    file: str
    name: str  # the shared definition, if neither imports the other
    by: str  # the file with that definition
    its: bool  # the previous file implements it, not this one


def steps() -> list[Step]:
    """Return every step of every walk. A dash belongs to the number before it."""
    found = []
    for walk, text in re.findall(
        r"^### (.+?)\n(.*?)(?=^##)", PAGE.partition("## Five walks\n")[2], re.MULTILINE | re.DOTALL
    ):
        trunk = ""
        for line in STEP.finditer(text):
            by = BY.match(line["by"] or "")
            name, home, its = (by["name"] or "", by["file"], bool(by["its"])) if by else ("", "", False)
            found.append(Step(walk, trunk, line["arrow"] or "", line["file"], name, home, its))
            if not line["indent"]:
                trunk = line["file"]
    return found


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("events", "controller", "workers", cache_dir=None)


def imports(importer: str, imported: str) -> bool:
    """Return whether a file imports another one, directly or indirectly."""
    a, b = (
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in (importer, imported)
    )
    return a == b or graph().chain_exists(importer=a, imported=b)


def path_of(module: str) -> str:
    """Return the file of a project module."""
    return module.replace(".", "/") + ".py"


def methods(file: str, name: str) -> set[str]:
    """Return the methods of a class without properties, including those inherited from project classes."""
    tree = ast.parse((ROOT / file).read_text())
    homes = {
        alias.name: path_of(node.module)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            functions = [
                each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            found |= {each.name for each in functions if not each.decorator_list}
            for base in node.bases:
                home = homes.get(ast.unparse(base), file)
                if (ROOT / home).exists():
                    found |= methods(home, ast.unparse(base))
    return found


def offers(file: str, promised: set[str]) -> bool:
    """Return whether a class of this file has all these methods."""
    return any(
        promised <= methods(file, name)
        for name in re.findall(r"^class (\w+)", (ROOT / file).read_text(), re.MULTILINE)
    )


def defined(file: str, name: str) -> bool:
    """Return whether a file defines this name at its top level."""
    return (
        re.search(rf"^(?:class {name}\b|{name}\b.* = )", (ROOT / file).read_text(), re.MULTILINE) is not None
    )


def test_there_are_five_walks_and_every_line_of_them_is_a_step() -> None:
    walks = {step.walk for step in steps()}
    assert len(walks) == 5
    text = PAGE.partition("## Five walks\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^ *(?:\d+\.|-) ", text, re.MULTILINE)) == len(steps()), (
        "a step begins with an arrow and a file"
    )


@pytest.mark.slow
@pytest.mark.parametrize("step", steps(), ids=lambda step: f"{step.walk}-{step.file}")
def test_a_walk_follows_the_imports(step: Step) -> None:
    for file in (step.file, step.by):
        assert not file or (ROOT / file).exists(), file
    before, file, by = step.before, step.file, step.by
    if not before:
        assert not step.arrow
    elif step.arrow == "→":
        assert imports(before, file)
    elif step.arrow == "←":
        assert imports(file, before)
    else:
        assert by, f"{step.arrow} must give in parentheses the definition that both ends share"
        assert imports(before, by) and imports(file, by)
        assert not step.name or defined(by, step.name)
    if step.arrow == "⇢":
        promised = methods(by, step.name)
        assert not promised or offers(before if step.its else file, promised), f"no {step.name}"


def test_the_diagram_matches_the_contracts() -> None:
    assert renewed(PAGE) == PAGE, "run `python tests/docs/architecture_page.py`"
