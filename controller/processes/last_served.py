"""Until when did the last frontend of this name serve? A small file that every frontend leaves behind.

It stands beside the spool, in the folder that a frontend of the same name finds again. Written whole or not at all;
without it nothing is known of the frontend before.
"""

import json
import os
from datetime import datetime
from pathlib import Path

import structlog

from controller.frontend.director import Served

log = structlog.get_logger(__name__)


def path_of(data: Path, name: str) -> Path:
    """Return where a frontend's file stands."""
    return data / "spool" / name / "served.json"


def read(path: Path) -> Served | None:
    """Return what the last frontend of this name has left behind; None if that cannot be known.

    Whatever is wrong with the file is logged: nothing is raised.
    """
    try:
        found = json.loads(path.read_text())
        until = datetime.fromisoformat(found["until"])
        if until.tzinfo is None:
            raise ValueError("a time without its zone")
        return Served(until, int(found["seq"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("served_unreadable", path=str(path), error=str(error))
        return None


def write(path: Path, served: Served) -> None:
    """Leave behind how far this frontend has come. A full disk is said, and nothing else comes of it."""
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps({"until": served.until.isoformat(), "seq": served.seq}))
        fresh.replace(path)
    except OSError as error:
        log.warning("served_not_written", path=str(path), error=str(error))
