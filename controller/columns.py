"""How wide may a line be that people read? As wide as the terminal, or as COLUMNS says; 80 where there is neither."""

import shutil
import textwrap

USUAL = 80
HANG = 4  # columns by which the rest of a line is indented


def columns() -> int:
    """Return how many columns there are."""
    return shutil.get_terminal_size((USUAL, 24)).columns


def fitted(line: str, width: int | None = None, hang: int = HANG) -> str:
    """Return a line so that it fits: what is too long goes on below, indented by `hang` more than the line is."""
    width = width or columns()
    if len(line) <= width:
        return line
    indent = min(len(line) - len(line.lstrip(" ")) + hang, width // 2)
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)
