"""The documentation's site builds without a warning: each link and anchor of a page leads somewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_each_page_is_on_it(tmp_path: Path) -> None:
    options = ["-q", "-W", "--keep-going", "-c", "docs", "-b", "html", "-d", str(tmp_path / "read")]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ".", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    pages = {page.relative_to(ROOT).with_suffix("") for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not (tmp_path / "site" / page).with_suffix(".html").exists()} == set()
    assert "docs/guides/engines" in (tmp_path / "site" / "searchindex.js").read_text()


def test_the_first_page_names_each_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    folders = [ROOT / "docs" / name for name in ("guides", "operations", "reference", "concepts")]
    pages = [
        str(page.relative_to(ROOT / "docs")) for folder in folders for page in sorted(folder.glob("*.md"))
    ]
    assert pages and [page for page in pages if f"]({page})" not in index] == []
