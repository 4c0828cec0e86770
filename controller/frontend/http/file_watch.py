"""Detects that a file was changed or replaced, by its identity, size and modification time."""

from pathlib import Path


class FileWatch:
    """The state of one file at the last check."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._seen = self._stat()

    def changed(self) -> bool:
        """Return whether the file has changed since the last check. A missing file counts as unchanged: it is being replaced."""
        now = self._stat()
        if now is None or now == self._seen:
            return False
        self._seen = now
        return True

    def _stat(self) -> tuple[int, int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
