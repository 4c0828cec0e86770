"""The README stays short: short lines, paragraphs and tables, five sections, the rest behind links."""

import re
from pathlib import Path

from controller.cli import COMMANDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
SECTIONS_MAX = 5
LINE_MAX, PARAGRAPH_LINES_MAX, TABLE_ROWS_MAX = 112, 5, 15  # columns, lines, rows


def blocks() -> list[list[str]]:
    """Return the README without diagrams and commands to copy, as paragraphs, list items and tables."""
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    items = re.sub(r"^(- |\d+\. )", r"\n\1", prose, flags=re.MULTILINE)
    return [block.splitlines() for block in re.split(r"\n\s*\n", items) if block.strip()]


def test_no_line_is_too_long() -> None:
    assert [line for line in TEXT.splitlines() if len(line) > LINE_MAX] == []


def test_no_paragraph_and_no_table_is_too_long() -> None:
    tables = [block for block in blocks() if block[0].startswith("|")]
    assert [block[0] for block in tables if len(block) - 2 > TABLE_ROWS_MAX] == []
    others = [block for block in blocks() if block not in tables]
    assert [block[0] for block in others if len(block) > PARAGRAPH_LINES_MAX] == []


def test_there_are_five_sections_two_commands_and_a_picture() -> None:
    before, *sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    assert len(sections) <= SECTIONS_MAX
    assert re.findall(r"^make (\w+)", before, re.MULTILINE) == ["demo", "test"]
    assert "┌─ controller ─┐" in before


def test_every_command_is_on_its_page() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert {name for name in COMMANDS if not re.search(rf"`(holdfast )?{name}\b", page)} == set()
