"""Writes to stderr that never fail the process or change its exit code (full disk, closed pipe)."""

import atexit
import contextlib
import os
import sys


class Stderr:
    """The process's stderr, without errors."""

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        try:
            sys.stderr.write(text)
        except (OSError, ValueError):
            ignore_exit_flush_errors()
        return len(text)

    def flush(self) -> None:
        """Flush the text, or drop it."""
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            ignore_exit_flush_errors()


def ignore_exit_flush_errors() -> None:
    """Keep unwritten text from failing the exit: Python flushes once more, and makes a failure the exit code."""
    atexit.unregister(_settle)
    atexit.register(_settle)


def _settle() -> None:
    try:
        sys.stderr.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    except ValueError:
        pass  # stderr is closed: there is nothing to flush
