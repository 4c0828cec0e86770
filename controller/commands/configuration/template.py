"""Generates the commented configuration file that `holdfast settings --write` writes."""

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

from controller.commands.configuration.described import TOP, below, of_up, of_worker
from controller.config.sections import section
from controller.config.variables import SECTIONS

COLUMNS = 110
HEAD = """\
#:schema config.schema.json
# Configuration of a Holdfast fleet: `holdfast up --config FILE`; a role reads its own table and the keys above the tables.
# Every key is commented out and shows its default. The environment and flags take precedence over this file.
# `holdfast settings --schema > config.schema.json` writes the schema for editors. Durations (_s) are in seconds.
"""

Described = Iterable[tuple[str, object, str]]


def template() -> str:
    """Return a configuration file with all keys commented out, each with its description and default."""
    lines = [HEAD, *_keys((name, default, text) for name, (text, default) in TOP.items())]
    lines += ["", "# Flags of `holdfast up` that are no settings", "[up]"]
    lines += _keys((key, action.default, action.help or "") for key, action in of_up().items())
    for role in SECTIONS:
        lines += _tables(role, below(section(role)()))
    lines += _tables("worker", of_worker())
    return "\n".join(lines) + "\n"


def _tables(role: str, described: Described) -> Iterator[str]:
    """Yield the lines of a role's table and of its inner tables.

    The keys of a table come before its inner tables, as TOML requires."""
    tables: dict[str, list[tuple[str, object, str]]] = {role: []}
    for place, default, text in described:
        above, _, name = f"{role}.{place}".rpartition(".")
        tables.setdefault(above, []).append((name, default, text))
    for table, keys in tables.items():
        yield f"\n[{table}]"
        yield from _keys(keys)


def _keys(described: Described) -> Iterator[str]:
    for name, default, text in described:
        said = " ".join(text.replace("%%", "%").split())
        if default is None:
            said = f"{name}: {said}" + ("" if "(default: " in said else " (no default)")
        yield from textwrap.wrap(said, COLUMNS, initial_indent="# ", subsequent_indent="# ")
        if default is not None:
            yield f"#{name} = {as_toml(default)}"


def as_toml(value: object) -> str:
    """Format a default as a TOML value, a duration as seconds."""
    if isinstance(value, timedelta):
        return as_toml(value.total_seconds())
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {as_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple | list | frozenset):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
