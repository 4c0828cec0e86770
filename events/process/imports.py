"""Excludes optional imports that a process does not need.

Libraries import packages that they need only in rare cases. Each takes a tenth of a process's start. In a worker it also takes
memory, which must be freed after a kill and so makes the kill take longer.
"""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without(*packages: str) -> Iterator[None]:
    """Make these optional packages appear missing to the imports inside, unless they are loaded already."""
    missing = [name for name in packages if name not in sys.modules]
    for name in missing:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's marker for a module that cannot be imported
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


@contextlib.contextmanager
def without_ca_certificates() -> Iterator[None]:
    """Keep an import inside from loading this machine's trusted certificate authorities (50 ms) into a TLS context.

    Use it only if no TLS request is made with that context: aiohttp's clients use the context created at aiohttp's import.
    """
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = os.devnull
    try:
        yield
    finally:
        if before is None:
            del os.environ["SSL_CERT_FILE"]
        else:
            os.environ["SSL_CERT_FILE"] = before
