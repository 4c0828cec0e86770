"""Settings of Sphinx, which builds the searchable site of these pages (`make docs`)."""

import re

from sphinx.application import Sphinx

project = "Holdfast"
root_doc = "docs/index"
include_patterns = ["*.md", "benchmarks/README.md", "docs/*.md", "docs/**/*.md"]
extensions = ["myst_parser"]
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 6
html_theme = "furo"
html_title = "Holdfast"
html_copy_source = False
html_show_copyright = False

ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')
NAVIGATION = {  # the sidebar, by page: captions and their pages. GitHub would show a toctree in the page as code.
    "docs/index": {
        "Getting started": ("../README", "getting-started/*"),
        "Guides": ("guides/*",),
        "Operations": ("operations/*",),
        "Reference": ("reference/*",),
        "Concepts": ("concepts/*",),
        "Project": ("../CHANGELOG", "../SECURITY", "../CONTRIBUTING", "../benchmarks/README"),
    },
    "docs/operations/runbooks": {"Runbooks": ("runbooks/*",)},
}


def _adapt(_app: Sphinx, page: str, source: list[str]) -> None:
    """Turn HTML anchors, which GitHub understands, into MyST targets, and append a page's part of the sidebar."""
    source[0] = ANCHOR.sub(r"[]{#\1}", source[0])
    for caption, pages in NAVIGATION.get(page, {}).items():
        lines = (":hidden:", ":glob:", f":caption: {caption}", "", *pages)
        source[0] += "\n```{toctree}\n" + "\n".join(lines) + "\n```\n"


def _redirect(app: Sphinx, error: Exception | None) -> None:
    """Let the site's root lead to the first page."""
    if error is None:
        page = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html"><title>Holdfast</title>'
        (app.outdir / "index.html").write_text(page)


def setup(app: Sphinx) -> None:
    """Register what this project adds to Sphinx."""
    app.connect("source-read", _adapt)
    app.connect("build-finished", _redirect)
