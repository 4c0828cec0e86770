"""The retention bounds of the journal, and their minimums."""

from dataclasses import dataclass
from datetime import timedelta

BYTES_MIN = 8 * 1024 * 1024  # a smaller journal would consist mostly of snapshots
AGE_MIN = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class JournalBounds:
    """The size and age limits of the stream. None: no limit."""

    bytes: int | None = None
    age: timedelta | None = None

    def __bool__(self) -> bool:
        """Return whether there is a limit."""
        return self.bytes is not None or self.age is not None
