"""Why does a worker go that nobody has told to?"""

from workers.engines.engine import EngineDead


class Retired(EngineDead):
    """The fleet holds this instance for dead: it was silent too long, or another took its name. A new one takes its place."""


class Broken(EngineDead):
    """A part of the worker failed that it cannot do without. The engine is not to blame."""


class Killed(EngineDead):
    """A rehearsal has killed this worker, which is one of many in its process."""


def broken(part: str, error: Exception) -> Broken:
    """Return what ends a worker whose part failed with `error`."""
    broken = Broken(f"{part} failed: {error!r}")
    broken.__cause__ = error
    return broken
