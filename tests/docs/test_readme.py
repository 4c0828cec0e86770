"""The README stays short, and first says what Holdfast is, how to start it, and what peers lack."""

import re
from pathlib import Path

from controller.cli import COMMANDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
LINES_MAX, SECTIONS_MAX = 150, 5
LINE_MAX, PARAGRAPH_LINES_MAX, TABLE_ROWS_MAX = 112, 5, 15  # columns, lines, rows


def blocks() -> list[list[str]]:
    """Return the paragraphs, list items and tables of the README, without its code."""
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    items = re.sub(r"^(- |\d+\. |\[\w+\]: )", r"\n\1", prose, flags=re.MULTILINE)
    return [block.splitlines() for block in re.split(r"\n\s*\n", items) if block.strip()]


def section(title: str) -> str:
    """Return the text of one section."""
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= LINES_MAX
    assert len(re.findall(r"^## ", TEXT, re.MULTILINE)) <= SECTIONS_MAX


def test_no_line_outside_a_table_is_too_long() -> None:
    assert [line for line in TEXT.splitlines() if len(line) > LINE_MAX and not line.startswith("|")] == []


def test_no_paragraph_and_no_table_is_too_long() -> None:
    tables = [block for block in blocks() if block[0].startswith("|")]
    assert [block[0] for block in tables if len(block) - 2 > TABLE_ROWS_MAX] == []
    others = [block for block in blocks() if block not in tables]
    assert [block[0] for block in others if len(block) > PARAGRAPH_LINES_MAX] == []


def test_a_picture_of_an_incident_precedes_the_first_section() -> None:
    before = TEXT.partition("\n## ")[0]
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", before)
    assert (ROOT / picture).exists()


def test_the_quick_start_installs_and_puts_it_in_front_of_two_servers_with_one_command() -> None:
    commands = "\n".join(re.findall(r"```\n(.*?)```", section("Quick start"), re.DOTALL))
    assert commands.startswith("make install\n")
    (command,) = (one for one in commands.replace("\\\n", "").splitlines() if "--upstream" in one)
    assert command.startswith(".venv/bin/holdfast up --engine openai") and command.count("--upstream ") == 2


def test_the_table_of_peers_has_its_date_and_all_peers() -> None:
    head = next(line for line in TEXT.splitlines() if line.startswith("| as of "))
    assert re.match(r"\| as of 20\d\d-\d\d \|", head)
    assert all(peer in head for peer in ("Holdfast", "Dynamo", "llm-d", "SGLang", "LiteLLM"))


def test_every_command_is_on_its_page() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert {name for name in COMMANDS if not re.search(rf"`(holdfast )?{name}\b", page)} == set()
