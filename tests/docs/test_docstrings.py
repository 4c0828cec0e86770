"""Most public functions have a docstring, and most that raise an error name it; no share may fall.

A public function is one of a module, or a method of a public class, without a leading underscore. Four groups are exempt:
stubs of protocols, one-line properties, asyncio's callbacks on its protocols and transports, and undocumented methods that
implement a protocol. The protocol must document the method, and must be in the same module or one imported by it.
A function raises if an exception class is raised by name in its own body (NotImplementedError does not count). It may
also document what its callees raise.
"""

import ast
import asyncio
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
# The shares today, rounded down to two digits. They may only grow: `python tests/docs/test_docstrings.py` prints the
# current shares and the functions without a docstring.
DOCUMENTED_MIN = 0.98
NAMING_MIN = 0.98
ASYNCIO = {
    name
    for kind in (asyncio.Protocol, asyncio.DatagramProtocol, asyncio.Transport)
    for name in dir(kind)
    if not name.startswith("_")
}
NAMES_ERRORS = re.compile(r"\bRaises?\b")


class PublicFunction(NamedTuple):
    """One function, and the docstring checks that apply to it."""

    where: str
    documented: bool
    raises: bool  # in its own body, by name
    names_errors: bool


@cache
def public_functions() -> tuple[PublicFunction, ...]:
    """Return every public function of the product."""
    return tuple(_found())


def _found() -> Iterator[PublicFunction]:
    trees = {
        path: ast.parse(path.read_text())
        for root in ("controller", "workers", "events")
        for path in sorted((ROOT / root).rglob("*.py"))
    }
    promised = {_module(path): _promised(tree) for path, tree in trees.items()}
    for path, tree in trees.items():
        known = [_module(path), *(node.module for node in tree.body if isinstance(node, ast.ImportFrom))]
        by_protocol = set().union(*(promised.get(module or "", set()) for module in known))
        groups = [(node, node.body) for node in tree.body if isinstance(node, ast.ClassDef) and _asked(node)]
        for owner, nodes in [(None, tree.body), *groups]:
            for node in nodes:
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not _public(node, owner):
                    continue
                if owner is None or ast.get_docstring(node) or node.name not in by_protocol:
                    yield _described(node, f"{path.relative_to(ROOT)}:{node.name}")


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _promised(tree: ast.Module) -> set[str]:
    """Return the methods that a module's protocols document."""
    protocols = [node for node in tree.body if isinstance(node, ast.ClassDef) and not _asked(node)]
    functions = [node for each in protocols for node in each.body]
    return {
        node.name
        for node in functions
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node)
    }


def _asked(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
    return not node.name.startswith("_") and "Protocol" not in bases


def _public(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.ClassDef | None) -> bool:
    if node.name.startswith("_") or any(
        ast.unparse(each).endswith("overload") for each in node.decorator_list
    ):
        return False
    if (
        owner is not None
        and node.name in ASYNCIO
        and any("asyncio." in ast.unparse(base) for base in owner.bases)
    ):
        return False
    is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
    return not (is_property and len(node.body) == 1)


def _described(node: ast.FunctionDef | ast.AsyncFunctionDef, where: str) -> PublicFunction:
    text = ast.get_docstring(node) or ""
    raises = any(isinstance(each, ast.Raise) and _by_name(each) for each in _own(node))
    return PublicFunction(where, bool(text), raises, bool(NAMES_ERRORS.search(text)))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a function's nodes, without those of nested functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield child
            yield from _own(child)


def _by_name(node: ast.Raise) -> bool:
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    name = raised.attr if isinstance(raised, ast.Attribute) else getattr(raised, "id", "")
    return name[:1].isupper() and name != "NotImplementedError"


def silent_functions() -> tuple[list[str], list[str]]:
    """Return the public functions without a docstring, and the raising ones that do not name their error."""
    functions = public_functions()
    return (
        [each.where for each in functions if not each.documented],
        [each.where for each in functions if each.raises and not each.names_errors],
    )


def shares() -> tuple[float, float]:
    """Return the share of functions with a docstring, and the share of raising ones that name their error."""
    functions = public_functions()
    undocumented, silent = silent_functions()
    raising = sum(each.raises for each in functions)
    return 1 - len(undocumented) / len(functions), 1 - len(silent) / raising


@pytest.mark.slow
def test_most_public_functions_have_a_docstring() -> None:
    assert shares()[0] >= DOCUMENTED_MIN, f"these have no docstring: {silent_functions()[0]}"


@pytest.mark.slow
def test_most_functions_that_raise_an_error_name_it() -> None:
    assert shares()[1] >= NAMING_MIN, f"these need a sentence with `Raise`: {silent_functions()[1]}"


def test_what_counts_as_raising() -> None:
    def described(source: str) -> PublicFunction:
        (node,) = ast.parse(source).body
        assert isinstance(node, ast.FunctionDef)
        return _described(node, "")

    assert described("def f():\n    'Do it. Raise KeyError.'\n    raise KeyError('x') from None").names_errors
    assert described("def f():\n    raise errors.Refused").raises
    assert not described(
        "def f():\n    try: g()\n    except KeyError as error:\n        log(error)\n        raise"
    ).raises
    assert not described("def f():\n    raise error").raises
    assert not described("def f():\n    def g(): raise KeyError\n    return g").raises


if __name__ == "__main__":
    print("DOCUMENTED_MIN = {:.4f}, NAMING_MIN = {:.4f}".format(*shares()))
    print(*silent_functions()[1], *silent_functions()[0], sep="\n")
