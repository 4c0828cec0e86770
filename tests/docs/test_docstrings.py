"""How many public functions say what they do, and how many of those that raise an error name it? Neither share may fall.

A public function is one of a module, or a method of a public class, without an underscore before its name. Not asked are
the stubs of protocols, properties of one line, what asyncio calls on its protocols and transports, and methods without a
word of their own whose protocol, in a module that theirs imports, says it for all that implement it. A function that raises
is one in whose own body a class of exceptions is raised by name (NotImplementedError is none); what it calls may
raise more, and saying so is welcome.
"""

import ast
import asyncio
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# What holds today. They may only grow: `python tests/docs/test_docstrings.py` prints the shares as they are now, and who is
# silent. Write a better share here, cut after the second digit.
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
    """One function, and what its docstring is asked for."""

    where: str
    documented: bool
    raises: bool  # itself, by name
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
    """Yield a function's nodes, without those of functions within it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield child
            yield from _own(child)


def _by_name(node: ast.Raise) -> bool:
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    name = raised.attr if isinstance(raised, ast.Attribute) else getattr(raised, "id", "")
    return name[:1].isupper() and name != "NotImplementedError"


def silent_functions() -> tuple[list[str], list[str]]:
    """Return the public functions without a docstring, and those that raise an error and do not name it."""
    functions = public_functions()
    return (
        [each.where for each in functions if not each.documented],
        [each.where for each in functions if each.raises and not each.names_errors],
    )


def shares() -> tuple[float, float]:
    """Return which share of them has a docstring, and of those that raise an error which names it."""
    functions = public_functions()
    undocumented, silent = silent_functions()
    raising = sum(each.raises for each in functions)
    return 1 - len(undocumented) / len(functions), 1 - len(silent) / raising


def test_most_public_functions_say_what_they_do() -> None:
    assert shares()[0] >= DOCUMENTED_MIN, f"these say nothing: {silent_functions()[0]}"


def test_most_functions_that_raise_an_error_name_it() -> None:
    assert shares()[1] >= NAMING_MIN, f"these want a sentence with `Raise`: {silent_functions()[1]}"


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
