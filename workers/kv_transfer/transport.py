"""How bytes get into a target's region without going over the socket: written there by the source itself.

On one host the source maps the region. A `Transport` does the same over a network or into another device's memory: the
target offers a region in its own words, which travel in the grant, and the source writes by them. Notices, checksums
and everything else stay as they are: who vouches for the bytes is the chunk's xxh3, not the transport.
"""

from typing import Protocol


class Remote(Protocol):
    """A region of another worker."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write, and return when all of it is there. Raise TransferFailed."""
        ...

    def break_off(self) -> None:
        """Let a write that is under way fail soon. From any thread; does not wait."""
        ...

    def close(self) -> None:
        """Write no more. May be called twice."""
        ...


class Transport(Protocol):
    """A way into other workers' regions. For any thread."""

    name: str

    def offer(self, memory: memoryview) -> bytes:
        """Let others write here, and return what they need to know. Raise TransferFailed."""
        ...

    def withdraw(self, memory: memoryview, quiet: bool) -> None:
        """Let nobody write here any more. `quiet`: who was let has said that he writes no more."""
        ...

    def remote(self, offer: bytes, deadline_s: float) -> Remote:
        """Return the region that was offered with these words. Raise TransferFailed."""
        ...
