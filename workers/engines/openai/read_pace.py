"""Limits how fast an upstream's streams are read, so that a flood does not delay other upstreams.

    an answer's tokens       read at once: requests limit them (`max_tokens`)
    comments, empty events   1 MiB at once, then 256 KiB per second; the rest waits in the server's own buffers

The budget is that of all streams of one upstream together. A token pays for 8 KiB, which is more than it takes with 20 logprobs.
"""

from collections.abc import Callable

PER_TOKEN_BYTES = 8 * 1024
BURST_BYTES = 1024 * 1024
BYTES_PER_S = 256 * 1024
WAIT_S_MAX = 1.0


class ReadPace:
    """The budget of one upstream for bytes that carry no token."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Use the clock `now` (monotonic seconds)."""
        self._now = now
        self._left = float(BURST_BYTES)
        self._at = now()

    def take(self, size: int, chunks: int) -> float:
        """Charge `size` bytes that gave `chunks` chunks of an answer. Return the seconds to wait before the next read."""
        idle = size - chunks * PER_TOKEN_BYTES
        if idle <= 0:
            return 0.0
        now = self._now()
        self._left = min(BURST_BYTES, self._left + (now - self._at) * BYTES_PER_S) - idle
        self._at = now
        return min(WAIT_S_MAX, -self._left / BYTES_PER_S) if self._left < 0 else 0.0
