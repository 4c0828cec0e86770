"""The metrics and labels that a PromQL query uses, and those that docs/reference/metrics.md documents."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql

METRICS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
OF_TARGETS = {"role", "process", "instance", "job", "le"}


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return each metric of docs/reference/metrics.md with its kind and its labels, merged over all roles."""
    found: dict[str, tuple[str, set[str]]] = {}
    for name, kind, labels in re.findall(
        r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|", METRICS.read_text(), re.MULTILINE
    ):
        known = found.get(name, (kind, set()))[1]
        found[name] = kind, known | set(re.findall(r"`(\w+)`", labels))
    return found


KNOWN = documented()


def base(name: str) -> str:
    """Return the metric that a series belongs to."""
    for suffix in ("_bucket", "_sum", "_count"):
        stem = name.removesuffix(suffix)
        if stem != name and KNOWN.get(stem, ("", set()))[0] == "histogram":
            return stem
    return name


def parsed(ask: str) -> Any:
    return promql.parse(ask.replace("$__rate_interval", "1m").replace("$objective", "0.999"))


def nodes(node: Any) -> Iterator[Any]:
    """Yield a query's nodes, starting with itself."""
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "param"):
        inner = getattr(node, name, None)
        if inner is not None:
            yield from nodes(inner)
    for one in getattr(node, "args", None) or ():
        yield from nodes(one)


def counted(ask: str) -> set[str]:
    """Return the series that a query counts with rate, increase or irate."""
    calls = [node for node in nodes(parsed(ask)) if isinstance(node, promql.Call)]
    growth = [call for call in calls if call.func.name in ("rate", "increase", "irate")]
    return {
        one.name
        for call in growth
        for argument in call.args
        for one in nodes(argument)
        if isinstance(one, promql.VectorSelector) and one.name is not None
    }


def selectors(ask: str) -> list[Any]:
    return [node for node in nodes(parsed(ask)) if isinstance(node, promql.VectorSelector)]
