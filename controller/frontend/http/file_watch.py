"""Notices that a file was changed or replaced, by its identity, size and time of modification."""

from pathlib import Path


class FileWatch:
    """One file, as it was when it was last looked at."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._seen = self._look()

    def changed(self) -> bool:
        """Say whether the file differs from the last look. A file that is missing has not changed: it is being replaced."""
        now = self._look()
        if now is None or now == self._seen:
            return False
        self._seen = now
        return True

    def _look(self) -> tuple[int, int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
