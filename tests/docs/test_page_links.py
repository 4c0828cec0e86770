"""Links, paths and commands on the pages lead to existing targets."""

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import KNOWN as BENCHMARKS

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)#?([^)\s]*)\)")
FOLDER = re.compile(r"`((?:benchmarks|controller|docs|events|migrations|tests|workers)/[\w/.-]*)`")
BARE = re.compile(r"`(\w+\.py)`")  # a module named without its folder
TARGET = re.compile(r"(?:^|`)make ([a-z][\w-]*)", re.MULTILINE)
MODULE = re.compile(r"python -m ((?:benchmarks|controller|events|workers)[\w.]*)")


def sources() -> list[Path]:
    """Return every module of the project and of the tests."""
    roots = ("benchmarks", "controller", "events", "migrations", "tests", "workers")
    return [path for root in roots for path in (ROOT / root).rglob("*.py")]


def targets() -> set[str]:
    """Return the targets of the Makefile."""
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings, as GitHub spells them, and explicit anchors."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    spelt = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return spelt | set(re.findall(r'<a id="([\w-]+)">', text))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_path_and_command_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    for file, anchor in LINK.findall(text):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"
    assert [name for name in FOLDER.findall(text) if not (ROOT / name).exists()] == []
    assert set(BARE.findall(text)) <= {path.name for path in sources()}
    assert set(TARGET.findall(text)) <= targets()
    modules = [ROOT / name.replace(".", "/") for name in MODULE.findall(text)]
    assert [m for m in modules if not (m.with_suffix(".py").exists() or (m / "__main__.py").exists())] == []


def test_every_figure_has_its_command() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    tables = [table.partition("\n\n")[0] for table in text.split("| command |\n")[1:]]
    rows = [row for table in tables for row in table.splitlines()[1:]]
    commands = [row.rstrip(" |").rpartition("| `")[2].split()[0].strip("`") for row in rows]
    assert len(commands) > 80
    assert set(commands) <= BENCHMARKS.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_benchmark_that_a_page_names_can_be_run(page: Path) -> None:
    assert set(re.findall(r"python -m benchmarks (\w+)", page.read_text())) <= BENCHMARKS.keys()


@pytest.mark.slow
def test_every_page_is_reachable_from_the_readme() -> None:
    found: set[str] = set()
    waiting = ["README.md"]
    while waiting:
        page = waiting.pop()
        if page not in found:
            found.add(page)
            waiting += [other.name for other in PAGES if other.name in _named(page)]
    assert {page.name for page in PAGES} == found


def _named(page: str) -> set[str]:
    text = "".join(path.read_text() for path in PAGES if path.name == page)
    return set(re.findall(r"[\w-]+\.md", text))


def test_the_map_of_the_code_names_every_package() -> None:
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
    text = page.partition("## The map of the code\n")[2].partition("\n## ")[0]
    roots = [ROOT / name for name in ("controller", "workers", "events")]
    folders = [init.parent for root in roots for init in root.glob("*/__init__.py")]
    folders += [
        init.parent
        for root in ("controller/frontend", "controller/router", "controller/adapters")
        for init in (ROOT / root).glob("*/__init__.py")
    ]
    assert {folder.name for folder in folders if f"{folder.name}/`" not in text} == set()
