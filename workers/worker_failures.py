"""The failures that end a worker without a stop command."""

from workers.engines.engine import EngineDead


class Retired(EngineDead):
    """The fleet considers this instance dead: it was silent too long, or another took its name. A new instance replaces it."""


class Broken(EngineDead):
    """An essential part of the worker failed. The engine is not to blame."""


class Killed(EngineDead):
    """A rehearsal has killed this worker, which is one of many in its process."""


def broken(part: str, error: Exception) -> Broken:
    """Return the failure that ends a worker after one of its parts failed with `error`."""
    broken = Broken(f"{part} failed: {error!r}")
    broken.__cause__ = error
    return broken
