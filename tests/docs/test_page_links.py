"""A reader who follows a page's link, path or command arrives somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)#?([^)\s]*)\)")
FOLDER = re.compile(r"`((?:benchmarks|controller|docs|events|migrations|tests|workers)/[\w/.-]*)`")
MODULE = re.compile(r"python -m ((?:benchmarks|controller|events|workers)[\w.]*)")


def anchors(page: Path) -> set[str]:
    """Return what a link may name in a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = page.read_text()
    for file, anchor in LINK.findall(text):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"
    assert [name for name in FOLDER.findall(text) if not (ROOT / name).exists()] == []
    modules = [ROOT / name.replace(".", "/") for name in MODULE.findall(text)]
    assert [m for m in modules if not (m.with_suffix(".py").exists() or (m / "__main__.py").exists())] == []


def test_every_figure_has_its_command() -> None:
    table = (ROOT / "benchmarks" / "README.md").read_text().partition("| command |\n")[2].partition("\n\n")[0]
    commands = [row.rstrip(" |").rpartition("| `")[2].split()[0].strip("`") for row in table.splitlines()[1:]]
    assert len(commands) > 40
    assert {name for name in commands if not (ROOT / "benchmarks" / f"{name}.py").exists()} == set()


def test_every_page_is_named_by_the_readme_or_by_a_page_that_is() -> None:
    found: set[str] = set()
    waiting = ["README.md"]
    while waiting:
        page = waiting.pop()
        if page not in found:
            found.add(page)
            waiting += [other.name for other in PAGES if other.name in _named(page)]
    assert {page.name for page in PAGES} == found


def _named(page: str) -> set[str]:
    text = (ROOT / page if page == "README.md" else ROOT / "docs" / page).read_text()
    return set(re.findall(r"[\w-]+\.md", text))
