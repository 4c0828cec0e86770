"""Defines the limits of the journal's size and age, and the smallest allowed limits."""

from dataclasses import dataclass
from datetime import timedelta

BYTES_MIN = 8 * 1024 * 1024  # a smaller journal would consist mostly of snapshots
AGE_MIN = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class JournalBounds:
    """The limits of the stream's size in bytes and of its age. None means no limit."""

    bytes: int | None = None
    age: timedelta | None = None

    def __bool__(self) -> bool:
        """Return whether there is a limit of size or age."""
        return self.bytes is not None or self.age is not None
