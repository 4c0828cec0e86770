"""Prints the output of `holdfast up`. A closed terminal or an unread pipe does not stop the fleet."""

import select
import sys
from typing import TextIO

from controller.terminal_text import escape_controls
from events.process.logs import ignore_exit_flush_errors


def print_line(text: str) -> None:
    """Print a line to stdout. If stdout cannot be written, drop the line."""
    _write(sys.stdout, text)


def warn(text: str) -> None:
    """Print a line to stderr. If stderr cannot be written, drop the line."""
    _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    try:
        if _is_writable(stream):
            print("\n".join(map(escape_controls, text.split("\n"))), file=stream, flush=True)
    except (OSError, ValueError):  # the pipe, the terminal or the file is closed
        ignore_exit_flush_errors()


def _is_writable(stream: TextIO) -> bool:
    """Return whether a line can be written without blocking. A write to a full pipe would block."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a file of the system, so a write cannot block
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))
