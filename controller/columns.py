"""Width of printed lines: that of the terminal, or COLUMNS if it is set; 80 if neither is known."""

import shutil
import textwrap

USUAL = 80
HANG = 4  # columns by which the rest of a line is indented


def columns() -> int:
    """Return the width of the output in columns."""
    return shutil.get_terminal_size((USUAL, 24)).columns


def fitted(line: str, width: int | None = None, hang: int = HANG) -> str:
    """Return a line wrapped to `width` columns. Continuation lines are indented `hang` columns more than the line."""
    width = width or columns()
    if len(line) <= width:
        return line
    indent = min(len(line) - len(line.lstrip(" ")) + hang, width // 2)
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)
