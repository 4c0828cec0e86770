"""Escapes text for terminals, because names and reasons may come from a compromised worker.

Control characters (C0 and C1), bidirectional controls, line separators and lone surrogates become `\\uXXXX`. Unescaped, such
characters could clear the screen, reorder the displayed text, send input as if from the operator, or set the terminal's title.
In JSON output, `\\uXXXX` denotes the original character.
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

_BAD = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
_unsafe = re.compile(f"[{_BAD}]")
# color sequences are not escaped, because the commands print them
_unsafe_in_output = re.compile(f"(\x1b\\[[0-9;]{{0,32}}m)|(?![\n\t])[{_BAD}]")


def escape_controls(text: str) -> str:
    """Return a text in which all characters that a terminal would interpret, also line breaks, are escaped."""
    return text if text.isascii() and text.isprintable() else _unsafe.sub(_escape, text)


def safe_values(value: Any) -> Any:
    """Return a value of JSON types with every string in it escaped by `escape_controls`, including keys."""
    match value:
        case str():
            return escape_controls(value)
        case dict():
            return {
                escape_controls(name) if isinstance(name, str) else name: safe_values(one)
                for name, one in value.items()
            }
        case list() | tuple():
            return [safe_values(one) for one in value]
    return value


class SafeStream:
    """Wraps a text stream, and escapes all control characters except newlines, tabs and color sequences."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text with its control characters escaped. Return the length of the original text."""
        self._stream.write(_unsafe_in_output.sub(_escape_but_colors, text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each text in `lines` with its control characters escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """Replace stdout and stderr with streams that escape control characters, until the `with` block ends."""
    with ExitStack() as stack:
        if sys.stdout is not None:
            stack.enter_context(redirect_stdout(cast(TextIO, SafeStream(sys.stdout))))
        if sys.stderr is not None:
            stack.enter_context(redirect_stderr(cast(TextIO, SafeStream(sys.stderr))))
        yield


def _escape(found: "re.Match[str]") -> str:
    return f"\\u{ord(found[0]):04x}"


def _escape_but_colors(found: "re.Match[str]") -> str:
    return found[1] or _escape(found)


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters. A longer text is cut, and ends in "…"."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


USUAL = 80  # columns of the output if the terminal's width is unknown
HANG = 4  # columns by which the continuation lines of a wrapped line are indented


def columns() -> int:
    """Return the width of the terminal in columns."""
    return shutil.get_terminal_size((USUAL, 24)).columns


def fitted(line: str, width: int | None = None, hang: int = HANG) -> str:
    """Return a line wrapped to `width` columns, by default the terminal's width.

    Continuation lines are indented by `hang` columns more than the first line, but by no more than half the width.
    """
    width = width or columns()
    if len(line) <= width:
        return line
    indent = min(len(line) - len(line.lstrip(" ")) + hang, width // 2)
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)
