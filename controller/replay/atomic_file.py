"""Writes reports to files atomically."""

import os
from pathlib import Path

from events.errors import HoldfastError


class CannotWrite(HoldfastError):
    """The report cannot be written there."""


def written(where: Path, text: str) -> str:
    """Write `text` to the file `where` atomically, and return the text's size, such as "1.2 MB".

    Raise CannotWrite if the file cannot be written."""
    beside, data = where.with_name(f".{where.name}.{os.getpid()}"), text.encode()
    try:
        beside.write_bytes(data)
        beside.replace(where)
    except OSError as error:
        raise CannotWrite(f"{where}: {error.strerror or error}. {CannotWrite.__doc__}") from None
    return f"{len(data) / 1e6:.1f} MB" if len(data) > 100_000 else f"{len(data) / 1e3:.1f} kB"
