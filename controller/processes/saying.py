"""What a fleet's supervisor says to whoever started it: a terminal that has gone must not take the fleet along."""

import contextlib
import sys


def say(text: str) -> None:
    """Print a line, if anybody can still read it."""
    with contextlib.suppress(OSError, ValueError):  # a closed pipe, a terminal that is gone, a closed file
        print(text, flush=True)


def warn(text: str) -> None:
    """Print a line to stderr, if anybody can still read it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
