"""Reads a secret key from a file that contains only this key, and writes private files.

A key is read from a file, because a file can be protected by its permissions. Command-line arguments are visible to all users
of the host in `ps`.
"""

import os
from pathlib import Path

BYTES_MAX = 64 * 1024


def read_key(path: Path) -> str:
    """Return the key in a file. Raise ValueError with the reason if the file cannot be read or does not contain exactly one
    key."""
    try:
        with path.open("rb") as file:
            text = file.read(BYTES_MAX).decode("ascii").strip()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} holds no key: a key consists of ASCII letters, digits and signs") from None
    if not text:
        raise ValueError(f"{path} is empty: it must hold the key")
    if not text.isprintable() or " " in text:
        raise ValueError(f"{path} must hold the key alone, on one line")
    return text


def write_private(path: Path, text: str) -> None:
    """Write a file atomically, readable by its owner alone, and sync it to disk. Raise OSError if this fails."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
