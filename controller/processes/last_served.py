"""The file in which a frontend stores until when it served, for the next frontend of the same name.

The file is beside the spool, in the folder that frontends of the same name share. It is written atomically. Without the file,
nothing is known about the previous frontend.
"""

import json
import os
from datetime import datetime
from pathlib import Path

import structlog

from controller.frontend.director import ServedUntil

log = structlog.get_logger(__name__)


def path_of(data: Path, name: str) -> Path:
    """Return the path of a frontend's file."""
    return data / "spool" / name / "served.json"


def read(path: Path) -> ServedUntil | None:
    """Return what the previous frontend of this name stored, or None if that is unknown.

    Problems with the file are logged, never raised.
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
    """Store how far this frontend has served. A full disk is logged and has no other effect."""
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps({"until": served.until.isoformat(), "seq": served.seq}))
        fresh.replace(path)
    except OSError as error:
        log.warning("served_not_written", path=str(path), error=str(error))
