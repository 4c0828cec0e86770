"""Where logs go: a full disk or a closed pipe under stderr must not stop whoever has something to log, nor be what the
process says by its exit code."""

import atexit
import contextlib
import os
import sys


class Stderr:
    """The process's stderr, which never refuses."""

    def write(self, text: str) -> int:
        """Write, or lose it."""
        try:
            sys.stderr.write(text)
        except (OSError, ValueError):
            lose_the_rest()
        return len(text)

    def flush(self) -> None:
        """Bring it to the other side, or lose it."""
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            lose_the_rest()


def lose_the_rest() -> None:
    """Let the exit not fail by what could not be written: Python tries it once more, and makes its failure the exit code."""
    atexit.unregister(_settle)
    atexit.register(_settle)


def _settle() -> None:
    try:
        sys.stderr.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    except ValueError:
        pass  # it is closed: nothing is tried
