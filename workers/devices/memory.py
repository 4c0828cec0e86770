"""What stood against the GPUs of a worker when its last watch ended, in a file of the host that they are in.

A GPU is reset only when nobody reads it: the watch that said a fault has ended by then, and its successor must know of
it to say that it is over.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import structlog

from events.subjects import token
from workers.devices.faults import FaultChange

log = structlog.get_logger(__name__)


class Memory:
    """The file of one watch. It holds what stands, and is not there while nothing does."""

    def __init__(self, data: Path, name: str) -> None:
        self._path = data / "devices" / f"{token(name)}.json"

    def recall(self) -> dict[str, list[FaultChange]]:
        """Return what stood, by device. A file that cannot be read is as none."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, list[FaultChange]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("device_memory_unreadable", path=str(self._path), error=str(error))
            return {}

    def keep(self, standing: Mapping[str, Iterable[FaultChange]]) -> None:
        """Keep what stands now. A disk that takes nothing costs only this."""
        faults = {device: found for device, changes in standing.items() if (found := list(changes))}
        try:
            if not faults:
                self._path.unlink(missing_ok=True)
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".tmp")
            fresh.write_bytes(msgspec.json.encode(faults))
            fresh.replace(self._path)  # whole or not at all
        except OSError as error:
            log.warning("device_memory_unwritable", path=str(self._path), error=str(error))
