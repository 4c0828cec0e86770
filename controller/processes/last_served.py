"""The file with the time at which a frontend served last, for the next frontend of the same name.

The file is beside the spool, in the folder that all frontends of the same name use. It is written atomically. Without the file,
the next frontend does not know when the previous one stopped serving.
"""

import json
import os
from datetime import datetime
from pathlib import Path

import structlog

from controller.frontend.director import ServedUntil

log = structlog.get_logger(__name__)


def path_of(data: Path, name: str) -> Path:
    """Return the path of the file of the frontend with this name."""
    return data / "spool" / name / "served.json"


def read(path: Path) -> ServedUntil | None:
    """Return the time until which the previous frontend of this name served. Return None if the file is missing or unreadable.

    If the file is unreadable, log the reason. No error is raised.
    """
    try:
        found = json.loads(path.read_text())
        until = datetime.fromisoformat(found["until"])
        if until.tzinfo is None:
            raise ValueError("a time without a zone")
        return ServedUntil(until, int(found["seq"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("served_unreadable", path=str(path), error=str(error))
        return None


def write(path: Path, served: ServedUntil) -> None:
    """Write `served`, the time at which this frontend served last, to its file.

    An error, such as a full disk, is logged and not raised.
    """
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps({"until": served.until.isoformat(), "seq": served.seq}))
        fresh.replace(path)
    except OSError as error:
        log.warning("served_not_written", path=str(path), error=str(error))
