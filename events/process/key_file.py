"""Which secret does a file hold? A key alone, on one line: `ps` shows arguments to everybody, and a file can be closed."""

from pathlib import Path

BYTES_MAX = 64 * 1024


def read_key(path: Path) -> str:
    """Return the key that a file holds. Raise ValueError with the reason if it holds none, or more, or cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(BYTES_MAX).decode("ascii").strip()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} holds no key: keys are of plain letters, digits and signs") from None
    if not text:
        raise ValueError(f"{path} is empty: it must hold the key")
    if not text.isprintable() or " " in text:
        raise ValueError(f"{path} must hold the key alone, on one line")
    return text
