"""Stores the kinds in force on disk, for a process that starts while the broker is unreachable.

On one stream the set of kinds in force only grows. So such a process may publish, into its spool on disk, the kinds that were
in force before, instead of holding them in memory until the broker is reachable again.
"""

from pathlib import Path

import msgspec
import structlog

from events.versions import names

IN_FORCE = "kinds_in_force.json"

log = structlog.get_logger(__name__)


class KindMemory:
    """A small file beside the spool; without a path, nothing is stored."""

    def __init__(self, path: Path | None, *, read: bool = True) -> None:
        self._path = path
        self.kinds = frozenset[str]()
        if read and path is not None and path.exists():
            try:
                self.kinds = names(msgspec.json.decode(path.read_bytes()))
            except (OSError, msgspec.MsgspecError, ValueError) as error:
                log.warning("kinds_in_force_unreadable", file=str(path), error=str(error))

    def keep(self, kinds: frozenset[str]) -> None:
        """Write the kinds in force, atomically."""
        if self._path is None or kinds == self.kinds:
            return
        fresh = self._path.with_suffix(".tmp")
        try:
            fresh.write_bytes(msgspec.json.encode(sorted(kinds)))
            fresh.replace(self._path)
        except OSError as error:
            log.warning("kinds_in_force_not_saved", file=str(self._path), error=str(error))
            return
        self.kinds = kinds
