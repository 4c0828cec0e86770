"""Stores the active GPU faults of a worker in a file on the GPUs' host, for the next watch.

A GPU can be reset only while no process uses it. So the watch that reported a fault has ended by the time of the reset. The
next watch needs the stored fault to report that it is over.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import structlog

from events.subjects import token
from workers.devices.faults import FaultChange

log = structlog.get_logger(__name__)


class Memory:
    """The file of one watch. It lists the active faults, and does not exist while there are none."""

    def __init__(self, data: Path, name: str) -> None:
        self._path = data / "devices" / f"{token(name)}.json"

    def recall(self) -> dict[str, list[FaultChange]]:
        """Return the stored faults by device. An unreadable file counts as empty."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, list[FaultChange]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("device_memory_unreadable", path=str(self._path), error=str(error))
            return {}

    def keep(self, standing: Mapping[str, Iterable[FaultChange]]) -> None:
        """Store the active faults. If the disk cannot be written, the next watch does not know them."""
        faults = {device: found for device, changes in standing.items() if (found := list(changes))}
        try:
            if not faults:
                self._path.unlink(missing_ok=True)
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".tmp")
            fresh.write_bytes(msgspec.json.encode(faults))
            fresh.replace(self._path)  # atomic replacement
        except OSError as error:
            log.warning("device_memory_unwritable", path=str(self._path), error=str(error))
