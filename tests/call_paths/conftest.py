"""Records the paths, and prints them as a table: `make call-paths`, `make call-paths WAY=drain`."""

import os
from collections.abc import AsyncIterator

import pytest
from call_limits import LIMITS, TARGETS
from call_recorder import CallRecorder, Way
from store_databases import database_url

__all__ = ["database_url"]

RECORDED = pytest.StashKey[dict[str, Way]]()


@pytest.fixture
async def recorder(request: pytest.FixtureRequest) -> AsyncIterator[CallRecorder]:
    """Records the path that the test is named after."""
    with CallRecorder().installed() as recorder:
        yield recorder
    name = request.node.name.removeprefix("test_").replace("_", "-")
    if name in LIMITS:
        request.config.stash.setdefault(RECORDED, {})[name] = recorder.way


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the recorded paths."""
    recorded = config.stash.get(RECORDED, {})
    if not recorded:
        return
    terminalreporter.section("call paths")
    row = "{:<12}{:>8}{:>16}{:>10}{:>10}".format
    terminalreporter.line(row("way", "files", "two-way pairs", "limit", "target"))
    for name, limit in LIMITS.items():
        if way := recorded.get(name):
            bounds = ("{}/{}".format(*limit), "{}/{}".format(*TARGETS[name]))
            terminalreporter.line(row(name, len(way.files), len(way.pairs), *bounds))
    if (chosen := os.environ.get("WAY", "")) in recorded:
        for line in listed(recorded[chosen]):
            terminalreporter.line(line)


def listed(way: Way) -> list[str]:
    """Return a path's files, calls between files, and pairs that call each other both ways, as lines of text."""
    lines = ["", "files", *(f"  {name}" for name in sorted(way.files)), "", "calls"]
    lines += [f"  {caller} -> {called}" for caller, called in sorted(way.edges)]
    lines += ["", "two-way pairs"]
    for pair in way.pairs:
        for caller, called in (pair, pair[::-1]):
            lines.append(f"  {caller} -> {called}: {', '.join(sorted(way.edges[caller, called]))}")
    return lines
