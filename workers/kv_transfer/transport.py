"""The interface for writing directly into a target's region, without a socket.

On one host the source maps the region. A `Transport` does the same over a network or into another device's memory. The target
encodes an offer of its region, which the grant contains, and the source writes according to the offer. All messages and
checksums are unchanged: the bytes are verified by the chunk's xxh3, not by the transport.
"""

from typing import Protocol


class Remote(Protocol):
    """A region of another worker."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write, and return when everything has arrived. Raise TransferFailed."""
        ...

    def break_off(self) -> None:
        """Make a running write fail soon. Callable from any thread; does not wait."""
        ...

    def close(self) -> None:
        """Stop writing. May be called twice."""
        ...


class Transport(Protocol):
    """A way to write into other workers' regions. Thread-safe."""

    name: str

    def offer(self, memory: memoryview) -> bytes:
        """Let others write into this memory, and return the encoded offer. Raise TransferFailed."""
        ...

    def withdraw(self, memory: memoryview, quiet: bool) -> None:
        """Stop others from writing here. `quiet`: the source has already finished writing."""
        ...

    def remote(self, offer: bytes, deadline_s: float) -> Remote:
        """Return the region of this encoded offer. Raise TransferFailed."""
        ...
