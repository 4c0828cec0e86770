"""The kinds that were in force when this process, or an earlier one on the same directory, heard of them last.

What is in force only grows on one stream. So a process that starts while the broker is away may publish, into its spool on disk,
what was in force before, instead of keeping it in memory until the broker is back.
"""

from pathlib import Path

import msgspec
import structlog

from events.versions import names

IN_FORCE = "kinds_in_force.json"

log = structlog.get_logger(__name__)


class KindMemory:
    """A small file beside the spool; None: nothing is remembered."""

    def __init__(self, path: Path | None, *, read: bool = True) -> None:
        self._path = path
        self.kinds = frozenset[str]()
        if read and path is not None and path.exists():
            try:
                self.kinds = names(msgspec.json.decode(path.read_bytes()))
            except (OSError, msgspec.MsgspecError, ValueError) as error:
                log.warning("kinds_in_force_unreadable", file=str(path), error=str(error))

    def keep(self, kinds: frozenset[str]) -> None:
        """Write down what is in force, whole or not at all."""
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
