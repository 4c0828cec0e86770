"""docs/guides/traces.md repeats flags and figures of the code, which must be equal."""

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.simulation import chat_traffic
from controller.trace import cli
from controller.trace.synthesis import SynthesisKnobs

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "traces.md").read_text()


def rows(heading: str, header: str) -> list[list[str]]:
    """Return the cells of the table with this header below a heading."""
    table = PAGE.partition(f"## {heading}\n")[2].partition(f"\n| {header} |")[2].partition("\n\n")[0]
    return [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.split("\n")[2:] if line
    ]


def flags_of(command: str) -> set[str]:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    actions = commands.choices[command]._actions
    return {option for action in actions for option in action.option_strings if option.startswith("--")}


def test_the_page_names_every_knob_and_its_default() -> None:
    shown = {row[0]: row[1] for row in rows("Knobs", "flag")}
    expected = {
        f"--{field.name.replace('_', '-')}": "none" if field.default is None else f"{field.default:g}"
        for field in fields(SynthesisKnobs)
    }
    assert shown == expected | {"--seed": "0"}


def test_the_page_names_exactly_the_existing_flags() -> None:
    known = {flag for command in ("analyze", "synthesize", "fit", "replay") for flag in flags_of(command)}
    named = set(re.findall(r"(--[a-z][a-z-]+)", PAGE))
    assert known - {"--help", "--output"} <= named
    assert named <= known


def test_the_page_shows_every_flag_of_replay() -> None:
    shown = {row[0] for row in rows("Replay", "flag")}
    assert shown == flags_of("replay") - {"--help", "--output", "--plot", "--block-size", "--skip-bad"}


def test_the_page_shows_the_published_figures() -> None:
    shown = {row[0]: row[1:] for row in rows("Profiles", "figure")}
    assert {name: float(cells[0].replace(",", "")) for name, cells in shown.items()} == chat_traffic.PUBLISHED
    for name, cells in shown.items():
        published, ours = (float(cell.replace(",", "")) for cell in cells)
        assert ours == pytest.approx(published, rel=0.1), name
