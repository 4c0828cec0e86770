"""Generates the tables of docs/reference/settings.md from the settings of every role:

python tests/docs/settings_page.py
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from controller.commands.configuration.described import below
from controller.config.flags import ALIASES, DYNAMO, FIXED, flagged
from controller.config.sections import section
from controller.config.variables import PREFIX, SECTIONS, WORKER_PREFIX
from controller.processes import up_flags
from controller.processes.up_flags import SETTINGS
from workers.cli import add_arguments
from workers.config.settings import WorkerSettings, annotations, groups
from workers.config.settings_check import DYNAMO as WORKER_DYNAMO

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
BEGIN = "<!-- generated: settings (python tests/docs/settings_page.py) -->"
END = "<!-- end of generated -->"
UP = {  # flags of `up` that set several settings, or have another name
    setting: ", ".join(flag for flag, own in SETTINGS.items() if own == setting)
    for setting in SETTINGS.values()
    if setting.startswith("controller.p") or setting == "controller.canary.interval_s"
}


@dataclass(frozen=True)
class Entry:
    """One setting."""

    variable: str
    default: str
    role_flag: str  # of the role that reads it; empty: none
    up_flag: str  # of `holdfast up`; empty: none
    says: str


def entries(role: str) -> Iterator[Entry]:
    """Yield the settings of a role."""
    if role == "worker":
        yield from _of_worker(annotations())
        return
    model = section(role)
    flags = {place: " ".join(f"`{name}`" for name in names) for place, names, _ in flagged(model)}
    offered = _offered(up_flags.add_arguments)
    for place, value, says in below(model()):
        of_up = UP.get(f"{role}.{place}") or _of_up(place, offered)
        variable = f"{PREFIX}{role.upper()}__{place.replace('.', '__').upper()}"
        yield Entry(variable, _shown(value), flags.get(place, ""), _code(of_up), says)


def _of_worker(names: Iterable[str]) -> Iterator[Entry]:
    """Yield the settings of a worker in one group."""
    flags = _offered(add_arguments)
    defaults = WorkerSettings()
    for name in names:
        own, says = flags[name]
        shown = " ".join(f"`{flag}`" for flag in own)
        yield Entry(f"{WORKER_PREFIX}{name.upper()}", _shown(getattr(defaults, name)), shown, "", says)


def _offered(add: Any) -> dict[str, tuple[list[str], str]]:
    """Return a parser's options by destination: the flags and their help."""
    parser = argparse.ArgumentParser()
    add(parser)
    # argparse shows its actions nowhere else
    return {a.dest: (list(a.option_strings), (a.help or "").replace("%%", "%")) for a in parser._actions}


def _of_up(place: str, offered: dict[str, tuple[list[str], str]]) -> str:
    known = offered.get(place)
    return known[0][0] if known else ""


def _code(flags: str) -> str:
    return ", ".join(f"`{flag}`" for flag in flags.split(", ")) if flags else ""


def _shown(value: Any) -> str:
    """Return a default as written into the environment; empty: none."""
    if value is None or value in ("", (), {}):
        return ""
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if isinstance(value, tuple):
        return ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in value)
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _table(found: Iterable[Entry]) -> Iterator[str]:
    """Yield the lines of one table, and an empty line."""
    yield "| variable | default | flag | flag of `up` | what it says |"
    yield "|---|---|---|---|---|"
    for e in found:
        cells = (f"`{e.variable}`", f"`{e.default}`" if e.default else "", e.role_flag, e.up_flag, e.says)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def tables() -> str:
    """Return the page's generated part."""
    lines = []
    for role in SECTIONS:
        lines += [f"### {role.capitalize()}", "", *_table(entries(role))]
    lines += ["### Worker", ""]
    for title, settings in groups().items():
        lines += [f"#### {title}", "", *_table(_of_worker(settings))]
    lines += ["### The seeds' names", "", "| in a seed | here |", "|---|---|"]
    for place, own in ALIASES.items():
        lines.append(f"| `{place}` | `{place.rpartition('.')[0]}.{own}` |")
    for place, (only, why) in FIXED.items():
        lines.append(f"| `{place}` | {only}, always: {why} |")
    lines += ["", "### Dynamo's variables", "", "| variable | here |", "|---|---|"]
    of_worker = {variable: f"worker.{name}" for variable, name in WORKER_DYNAMO.items()}
    lines += [f"| `{variable}` | `{place}` |" for variable, place in {**DYNAMO, **of_worker}.items()]
    lines.append("")
    return "\n".join(lines)


def renewed(page: str) -> str:
    """Return `page` with its tables generated again."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
