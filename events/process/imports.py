"""Imports that a process can do without, left out.

Libraries take along what they need in rare cases only: each is a tenth of a process's start, and in a worker memory to be
freed, which takes a kill longer.
"""

import contextlib
import os
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


@contextlib.contextmanager
def trusting_nobody() -> Iterator[None]:
    """Let an import inside that makes itself a TLS context not read every authority that this machine trusts (50 ms).

    For who asks nobody over TLS with it: aiohttp's clients have theirs from its import.
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
