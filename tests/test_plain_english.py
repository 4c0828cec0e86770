"""The language of everything that a person reads: what a program can check of it."""

import pytest
from plain_english import ALLOWED, ROOT, breaches, files, sentences

ALLOWED_MAX = 80  # lines that speak of people


@pytest.mark.slow
def test_what_people_read_is_plain_english() -> None:
    assert [breach for path in files() for breach in breaches(path)] == []


def test_few_lines_speak_of_people() -> None:
    lines = [line for line in ALLOWED.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) <= ALLOWED_MAX
    for line in lines:
        path, _, text = line.partition(": ")
        assert text in [one.strip() for one in (ROOT / path).read_text().splitlines()], line


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One. Two `a. b` three.", ["One.", "Two code three."]),
        ("Of [a page](b.md).\n\n```\nno. prose.\n```\n\n| a. | b. |\n", ["Of a page."]),
        ("- first\n- second", ["first", "second"]),
    ],
)
def test_sentences_of_prose(text: str, found: list[str]) -> None:
    assert [one.strip(" -\n") for one in sentences(text) if one.strip()] == found
