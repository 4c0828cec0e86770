"""Excludes optional imports that a process does not need.

Some libraries import packages that they need only in rare cases. Each such package takes a tenth of a process's start time. It
also takes memory. The system frees a worker's memory after a kill, so more memory makes the kill take longer.
"""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without(*packages: str) -> Iterator[None]:
    """While the context is open, let imports of these optional packages fail as if the packages were not installed. A
    package that is already loaded stays available."""
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
    """While the context is open, let an import create its TLS context without this machine's trusted certificate authorities.

    Loading them takes 50 ms. Use this only if no TLS request is made with the created TLS context. aiohttp's clients use the
    TLS context that aiohttp creates at its import.
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
