"""Where logs go: a full disk or a closed pipe under stderr must not stop whoever has something to log."""

import contextlib
import sys


class Stderr:
    """The process's stderr, which never refuses."""

    def write(self, text: str) -> int:
        """Write, or lose it."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Bring it to the other side, or lose it."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
