"""Escapes text for terminals: names and reasons may come from a compromised worker or a client.

Control characters (C0 and C1), bidirectional controls, line separators and lone surrogates become `\\uXXXX`. Unescaped, they
could clear the screen, reorder the displayed text, send input as if from the operator, or set the terminal's title. In JSON the
escape denotes the same character.
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
# the commands' own colours are kept
_unsafe_in_output = re.compile(f"(\x1b\\[[0-9;]{{0,32}}m)|(?![\n\t])[{_BAD}]")


def escape_controls(text: str) -> str:
    """Return one line of text with every character escaped that a terminal would interpret."""
    return text if text.isascii() and text.isprintable() else _unsafe.sub(_escape, text)


def safe_values(value: Any) -> Any:
    """Return a JSON-like value with every string in it made safe, including names."""
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
    """Text stream wrapper that passes only text, newlines, tabs and colours to a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text. Return its length."""
        self._stream.write(_unsafe_in_output.sub(_escape_but_colors, text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several strings."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """Replace stdout and stderr with streams that escape unsafe text."""
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
