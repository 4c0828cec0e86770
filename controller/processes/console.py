"""What a fleet's supervisor says to whoever started it: neither a terminal that has gone nor a pipe that nobody reads
must take the fleet along."""

import select
import sys
from typing import TextIO

from controller.terminal_text import safe
from events.process.stderr import lose_the_rest


def say(text: str) -> None:
    """Print a line, if anybody can still read it."""
    _write(sys.stdout, text)


def warn(text: str) -> None:
    """Print a line to stderr, if anybody can still read it."""
    _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    try:
        if _takes(stream):
            print("\n".join(map(safe, text.split("\n"))), file=stream, flush=True)
    except (OSError, ValueError):  # a closed pipe, a terminal that is gone, a closed file
        lose_the_rest()


def _takes(stream: TextIO) -> bool:
    """Say whether a line can be written without waiting: a full pipe takes none."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # no file of the system's: it has no reader to wait for
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))
