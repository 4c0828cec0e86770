"""Excludes optional imports that a process does not need.

Some libraries import packages that they need only in rare cases. Each such package takes a tenth of a process's start time. In
a worker it also takes memory. The system must free that memory after a kill, so the kill takes longer.
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
    """While the context is open, keep an import from loading this machine's trusted certificate authorities (50 ms) into a TLS
    context.

    Use it only if no TLS request is made with that TLS context. aiohttp's clients use the TLS context that is created at the
    import of aiohttp.
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
