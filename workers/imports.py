"""Imports that a worker can do without, left out: a killed process keeps its connections until its memory is freed."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without(*packages: str) -> Iterator[None]:
    """Let the imports inside find these optional packages missing, unless they are loaded already."""
    missing = [name for name in packages if name not in sys.modules]
    for name in missing:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's way to say: not to be found
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
