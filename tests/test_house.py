"""Checks limits on the code's structure: sizes, duplicate names, private access, forbidden words.

The function of the same name measures each limit in LIMITS. A limit may be lowered, never raised.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("controller", "events", "workers")
PURE = ("controller/deciders/", "controller/migration/")
WORDS = {
    word.title()  # former class names; in lower case here, so that a search for them does not find this list
    for word in (
        *("desk", "voice", "passage", "crossing", "departures"),
        *("mover", "obedience", "seat", "feeding", "wishes"),
    )
}

LIMITS = {
    "lines_of_a_function": 60,
    "lines_of_a_file": 600,  # an outer bound
    "parameters_of_a_constructor": 8,
    "methods_of_a_frontend_class": 19,
    "modules_of_a_folder": 22,
    "classes_of_one_name": 1,
    "blocks_for_type_checkers": 3,
    "calls_through_another_object": 0,
    "unexplained_private_access": 0,
    "uses_of_a_forbidden_word": 0,
    "patches_in_tests": 40,
    "private_attributes_in_tests": 60,
    "public_things_that_say_nothing": 0,
}

TWICE = {"Scheduler"}  # a frontend's and an engine's: the usual name in both fields


class Found(NamedTuple):
    """A measured size, and its place."""

    size: int
    where: str


Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed(folder: str) -> list[tuple[str, ast.Module]]:
    """Return every file of a folder, parsed."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in paths]


def source(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield every file of these folders, parsed."""
    for folder in folders:
        yield from parsed(folder)


KINDS = (ast.Attribute, ast.Call, ast.ClassDef, ast.If, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def nodes(folder: str) -> dict[type, list[tuple[str, ast.AST]]]:
    """Return all nodes of these kinds, each with its place. Cached: one walk for all limits takes seconds."""
    found: dict[type, list[tuple[str, ast.AST]]] = {kind: [] for kind in KINDS}
    for name, tree in source(folder):
        for node in ast.walk(tree):
            if type(node) in found:
                found[type(node)].append((name, node))
    return found


def every(*kinds: type[ast.AST], of: tuple[str, ...] = OURS) -> Iterator[tuple[str, ast.AST]]:
    """Yield every node of some kinds, with its place."""
    for folder in of:
        for kind in kinds:
            for name, node in nodes(folder)[kind]:
                yield f"{name}:{node.lineno}", node  # type: ignore[attr-defined]


def all_of(places: list[str]) -> list[Found]:
    """Return one measure: the total number of places."""
    return [Found(len(places), ", ".join(places))]


# --- sizes ------------------------------------------------------------------------------------------------------------


def lines_of_a_function() -> Iterator[Found]:
    for where, node in every(ast.FunctionDef, ast.AsyncFunctionDef, of=(*OURS, "benchmarks")):
        assert isinstance(node, Function)
        yield Found((node.end_lineno or 0) - node.lineno + 1, f"{where} {node.name}")


def lines_of_a_file() -> Iterator[Found]:
    for name, _ in source(*OURS, "benchmarks"):
        yield Found((ROOT / name).read_text().count("\n"), name)


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def parameters_of_a_constructor() -> Iterator[Found]:
    for where, node in every(ast.FunctionDef):
        assert isinstance(node, ast.FunctionDef)
        if node.name == "__init__":
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield Found(len(arguments) - 1, where)


def methods_of_a_frontend_class() -> Iterator[Found]:
    for where, node in every(ast.ClassDef, of=("controller/frontend",)):
        assert isinstance(node, ast.ClassDef)
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        yield Found(len(methods), f"{where} {node.name}")


def modules_of_a_folder() -> Iterator[Found]:
    modules: dict[str, int] = defaultdict(int)
    for name, _ in source(*OURS, "tests"):
        if not name.endswith("__init__.py"):
            modules[str(Path(name).parent)] += 1
    yield from (Found(count, folder) for folder, count in modules.items())


# --- names and dependencies -------------------------------------------------------------------------------------------


def classes_of_one_name() -> Iterator[Found]:
    places: dict[str, list[str]] = defaultdict(list)
    for where, node in every(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        places[node.name].append(where)
    yield from (
        Found(len(found), f"{name}: {', '.join(found)}")
        for name, found in places.items()
        if name not in TWICE
    )


def blocks_for_type_checkers() -> list[Found]:
    return all_of(
        [
            where
            for where, node in every(ast.If)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
    )


# methods of containers, strings, paths, instants, events, streams and metrics
OF_DATA = {
    "add", "append", "clear", "copy", "count", "discard", "drain", "endswith", "extend", "get", "inc", "index",
    "is_set", "isoformat", "items", "keys", "labels", "mkdir", "note", "observe", "of", "pop", "popitem", "popleft",
    "read", "readline", "register", "remove", "set", "setdefault", "split", "startswith", "timestamp", "total_seconds",
    "update",
    "values", "wait", "write", "writelines",
}  # fmt: skip


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def calls_through_another_object() -> list[Found]:
    """`a.b.c.d()` calls through other objects. On an object's own parts, methods of data are allowed: `self.a.b.get(name)`."""
    found = []
    for where, node in every(ast.Call):
        assert isinstance(node, ast.Call)
        hops, callee = 0, node.func
        while isinstance(callee, ast.Attribute):
            hops, callee = hops + 1, callee.value
        if isinstance(callee, ast.Name) and hops > (
            3 if callee.id == "self" and called(node) in OF_DATA else 2
        ):
            found.append(f"{where} {ast.unparse(node.func)}")
    return all_of(found)


def unexplained_private_access() -> list[Found]:
    """Private members of another class are accessed only with a comment that gives the reason."""
    found = []
    for name, tree in source(*OURS, "benchmarks"):
        lines = ["", *(ROOT / name).read_text().splitlines()]
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Attribute) and is_private(node)):
                continue
            explained = "#" in lines[node.lineno] or lines[node.lineno - 1].lstrip().startswith("#")
            around = (one for one in classes if one.lineno <= node.lineno <= (one.end_lineno or 0))
            if not explained and not any(node.attr in own_names(one) for one in around):
                found.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    return all_of(found)


def is_private(node: ast.Attribute) -> bool:
    """Return whether it is a private member of another object. Some public names of the standard library only look private."""
    if not node.attr.startswith("_"):
        return False
    public = node.attr.startswith("__") or node.attr in ("_exit", "_asdict", "_replace", "_fields")
    inherited = is_self(node.value) or ast.unparse(node.value) == "super()"
    return not public and not inherited


@cache
def own_names(definition: ast.ClassDef) -> set[str]:
    """Return the names that a class defines or sets itself: its methods may access them on other instances."""
    return {
        one.name if isinstance(one, Function) else one.attr
        for one in ast.walk(definition)
        if isinstance(one, Function) or (isinstance(one, ast.Attribute) and is_self(one.value))
    }


def uses_of_a_forbidden_word() -> list[Found]:
    """These were our own inventions; docs/reference/glossary.md has the field's terms."""
    found = [
        f"{name}: {word}"
        for name, _ in source("controller", "workers", "tests")
        for word in re.findall(r"\w+", (ROOT / name).read_text())
        if word in WORDS
    ]
    return all_of(found)


# --- tests' access to internals ---------------------------------------------------------------------------------------


def patches_in_tests() -> list[Found]:
    return all_of(
        [
            where
            for where, node in every(ast.Call, of=("tests",))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "setattr"
            and ast.unparse(node.func) == "monkeypatch.setattr"
        ]
    )


def private_attributes_in_tests() -> list[Found]:
    return all_of(
        [
            f"{where} {ast.unparse(node)}"
            for where, node in every(ast.Attribute, of=("tests",))
            if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr) and not is_self(node.value)
        ]
    )


# --- docstrings -------------------------------------------------------------------------------------------------------


def silent_things() -> list[str]:
    silent = []
    for name, tree in source(*OURS):
        if tree.body and ast.get_docstring(tree) is None:
            silent.append(f"{name}: the module")
        for node in tree.body:
            if not isinstance(node, Function | ast.ClassDef):
                continue
            if not node.name.startswith("_") and ast.get_docstring(node) is None:
                silent.append(f"{name}:{node.lineno} {node.name}")
    return silent


def public_things_that_say_nothing() -> list[Found]:
    return all_of(silent_things())


MEASURES: dict[str, Callable[[], Iterator[Found] | list[Found]]] = {
    measure.__name__: measure
    for measure in (
        lines_of_a_function, lines_of_a_file, parameters_of_a_constructor, modules_of_a_folder, classes_of_one_name,
        methods_of_a_frontend_class,
        blocks_for_type_checkers, calls_through_another_object, unexplained_private_access, uses_of_a_forbidden_word,
        patches_in_tests, private_attributes_in_tests, public_things_that_say_nothing,
    )
}  # fmt: skip


def test_every_limit_is_measured() -> None:
    assert LIMITS.keys() == MEASURES.keys()


@pytest.mark.slow
def test_pure_modules_have_docstrings() -> None:
    assert not [where for where in silent_things() if where.startswith(PURE)]


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_the_code_keeps_its_limits(name: str) -> None:
    over = [f"{found.size}: {found.where}" for found in MEASURES[name]() if found.size > LIMITS[name]]
    assert not over, f"{name.replace('_', ' ')}: {LIMITS[name]} at most\n" + "\n".join(sorted(over))


if __name__ == "__main__":  # print the current values
    for limit, bound in LIMITS.items():
        largest = max(MEASURES[limit]())
        print(f"{limit}: {largest.size} (bound {bound}): {largest.where[:200]}")


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their names alone."""
    counts = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []
