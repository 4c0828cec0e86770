"""Console output of a fleet's supervisor. A closed terminal or an unread pipe must not stop the fleet."""

import select
import sys
from typing import TextIO

from controller.terminal_text import escape_controls
from events.process.logs import ignore_exit_flush_errors


def say(text: str) -> None:
    """Print a line to stdout, if it can be written."""
    _write(sys.stdout, text)


def warn(text: str) -> None:
    """Print a line to stderr, if it can be written."""
    _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    try:
        if _is_writable(stream):
            print("\n".join(map(escape_controls, text.split("\n"))), file=stream, flush=True)
    except (OSError, ValueError):  # a closed pipe, a closed terminal, a closed file
        ignore_exit_flush_errors()


def _is_writable(stream: TextIO) -> bool:
    """Return whether a line can be written without blocking. A full pipe would block."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a system file: a write to it cannot block
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))
