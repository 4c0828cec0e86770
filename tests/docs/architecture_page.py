"""Draws the layers of the import contracts into docs/concepts/architecture.md:

python tests/docs/architecture_page.py
"""

import configparser
import re
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "architecture.md"
BEGIN = "<!-- generated: layers (python tests/docs/architecture_page.py) -->"
END = "<!-- end of generated -->"
PICTURED = ("controller", "controller.frontend", "workers")


def layers(container: str) -> list[str]:
    """Return a package's layers from the contracts, the highest first; · separates layers that must not import each other."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    for section in contracts.values():
        lines = [line.strip() for line in section.get("layers", "").splitlines() if line.strip()]
        if lines and all(line.startswith(f"{container}.") for line in lines):
            bare = [re.sub(rf"\b{container}\.", "", line) for line in lines]
            return [line.replace(" | ", " · ").replace(" : ", ", ") for line in bare]
    raise ValueError(f"no contract has the layers of {container}")


def picture() -> str:
    """Return one column for each package; each line may import the lines below it."""
    columns = [[name, "", *layers(name)] for name in PICTURED]
    widths = [max(map(len, column)) + 4 for column in columns]
    rows = zip_longest(*columns, fillvalue="")
    return "\n".join(
        "".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def renewed(page: str) -> str:
    """Return `page` with its diagram drawn again. Raise ValueError if it lacks the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n```\n{picture()}\n```\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
