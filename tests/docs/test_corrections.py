"""docs/concepts/corrections.md has a line for each cited correction, and names its test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "concepts" / "corrections.md").read_text()
CITED = re.compile(r"\(((?:[NB]\d+)(?:(?:, |–)[NB]\d+)*)\)")
TEST = re.compile(r"def (test_(?:[nb]\d\d_)+\w+)")
ROW = re.compile(r"^\| <a id=\"([nb]\d+)\"></a>([NB]\d+) \| .+ \| .+ \| `(\w+)` \|$", re.MULTILINE)


def readers() -> list[Path]:
    """Return the files that may cite corrections: the source, the tests, the pages."""
    code = [
        path for root in ("controller", "workers", "events", "tests") for path in (ROOT / root).rglob("*.py")
    ]
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "corrections.md"]
    return [path for path in (*code, *pages, ROOT / "README.md") if path != Path(__file__)]


def cited(text: str) -> set[str]:
    """Return the ids in parentheses, (N6) or (B7–B10, B13), and those in the names of tests."""
    found = {
        f"{kind.upper()}{int(n)}"
        for name in TEST.findall(text)
        for kind, n in re.findall(r"([nb])(\d\d)_", name)
    }
    for group in CITED.findall(text):
        for part in group.split(", "):
            first, _, last = part.partition("–")
            numbers = range(int(first[1:]), int((last or first)[1:]) + 1)
            found |= {f"{first[0]}{number}" for number in numbers}
    return found


def test_brackets_lists_and_ranges_are_citations() -> None:
    assert cited("of doubt (N6), (B7–B9, B13) and (B3, B4); not (N) or Bx1") == {
        "N6", "B7", "B8", "B9", "B13", "B3", "B4",
    }  # fmt: skip
    assert cited("def test_n10_n11_a_table() -> None:") == {"N10", "N11"}


def test_every_cited_correction_has_a_line_and_every_line_is_cited() -> None:
    lines = [name for _, name, _ in ROW.findall(PAGE)]
    assert len(lines) == len(set(lines)) == PAGE.count("<a id="), "a line for each, in the form of the others"
    everything = set().union(*(cited(path.read_text()) for path in readers()))
    assert {"missing": everything - set(lines), "uncited": set(lines) - everything} == {
        "missing": set(),
        "uncited": set(),
    }


def test_each_anchor_is_its_id() -> None:
    assert [(anchor, name) for anchor, name, _ in ROW.findall(PAGE) if anchor != name.lower()] == []


def test_the_test_of_each_correction_exists() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for _, name, test in ROW.findall(PAGE):
        numbered = f"{name[0].lower()}{int(name[1:]):02}"
        if test == f"test_{numbered}":
            assert re.search(rf"def test_(?:\w+_)?{numbered}_", tests), f"no test is called test_{numbered}_…"
        else:
            assert f"def {test}(" in tests, test
