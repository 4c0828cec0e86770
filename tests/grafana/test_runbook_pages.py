"""Each alert has a runbook with the same sections in the same order, and its commands exist."""

import re

import pytest
import runbooks
from runbooks import PAGES, named, shown, words

from controller.cli import parser_for
from grafana.rules import ALERTS

HEADINGS = ["Meaning", "User impact", "Diagnosis", "Mitigation", "Resolution"]
ALL = sorted(PAGES)


def test_each_alert_has_a_page_and_each_page_an_alert() -> None:
    assert {alert.runbook for alert in ALERTS} == {*PAGES}


@pytest.mark.parametrize("page", ALL)
def test_all_pages_have_the_same_sections(page: str) -> None:
    text = PAGES[page].read_text()
    assert text.startswith(f"# {page}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    sections = re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]
    assert all(section.strip() for section in sections)
    assert re.search(r"^1\. ", sections[3], re.MULTILINE)


@pytest.mark.parametrize("page", ALL)
def test_a_page_shows_the_output_of_its_commands(page: str) -> None:
    text = PAGES[page].read_text()
    assert shown(text)
    for found in runbooks.BLOCK.finditer(text):
        assert found[2].strip(), f"{found[1]}: nothing is shown"


@pytest.mark.parametrize("page", ALL)
def test_commands_named_in_sentences_exist(page: str) -> None:
    for command in named(PAGES[page].read_text()):
        given = words(command, "i")
        if given == ["journal", "quarantine"]:
            given += ["1", "--why", "it is known"]
        parser_for({given[0]}).parse_args(given)
