"""Rotates the logs of a fleet's processes, each at most twice `LOG_BYTES_MAX` (current and old file)."""

import os
import shutil
from pathlib import Path

LOG_BYTES_MAX = 32 * 1024 * 1024


def trim(log: Path, most: int = LOG_BYTES_MAX) -> None:
    """Truncate a log that is larger than `most` bytes, and keep its content as NAME.1.

    The logging process keeps appending. Lines that it writes between the copy and the truncation are lost."""
    try:
        if log.stat().st_size <= most:
            return
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)
    except OSError:  # no log yet, or a full disk: the next call tries again
        return
