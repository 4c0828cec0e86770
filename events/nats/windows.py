"""Flow control of a channel's two streams: bytes unsent, in flight, and not yet read."""

WINDOW_BYTES = 256 * 1024  # in flight: sent, and not known to have been read
HELD_BYTES_MAX = 2 * WINDOW_BYTES  # for a protocol that does not read; a peer may not send more than a window
BUFFER_BYTES = 64 * 1024  # unsent, above which the protocol is paused


class SendWindow:
    """The stream to the peer, in bytes."""

    __slots__ = ("acknowledged", "buffer", "high", "low", "paused", "sent")

    def __init__(self) -> None:
        self.buffer = bytearray()  # not yet sent
        self.sent = 0
        self.acknowledged = 0  # bytes that the peer has read
        self.paused = False  # the protocol was requested to stop writing
        self.high, self.low = BUFFER_BYTES, BUFFER_BYTES // 4

    @property
    def written(self) -> int:
        """Number of bytes written, sent or not."""
        return self.sent + len(self.buffer)

    def take(self, most: int) -> bytes:
        """Return the next bytes to send, at most `most`; empty if the window is full, or all is sent."""
        room = min(WINDOW_BYTES - (self.sent - self.acknowledged), most)
        if room <= 0 or not self.buffer:
            return b""
        payload = bytes(self.buffer[:room])
        del self.buffer[:room]
        return payload

    def limit(self, high: int | None, low: int | None) -> None:
        """Pause the protocol above `high` unsent bytes, and resume it at `low`; None: asyncio's default proportion."""
        self.high = BUFFER_BYTES if high is None else high
        self.low = self.high // 4 if low is None else low


class ReceiveWindow:
    """The stream from the peer, in bytes."""

    __slots__ = ("held", "read", "reading", "received", "said_read")

    def __init__(self) -> None:
        self.held = bytearray()  # received, and not yet read by the protocol
        self.received = 0
        self.read = 0
        self.said_read = 0  # the value of `read` that was last reported to the peer
        self.reading = True

    @property
    def due(self) -> bool:
        """Whether to report the bytes read to the peer, before it runs out of window."""
        return self.read - self.said_read >= WINDOW_BYTES // 4

    def take(self, payload: bytes) -> bool:
        """Buffer received bytes until the protocol reads them. Return False if the peer has sent more than it may."""
        self.received += len(payload)
        self.held += payload
        return len(self.held) <= HELD_BYTES_MAX

    def hand_on(self) -> bytes:
        """Return all held bytes and count them as read."""
        payload = bytes(self.held)
        self.held.clear()
        self.read += len(payload)
        return payload

    def drop(self, payload: bytes = b"") -> None:
        """Stop reading: held and received bytes count as read."""
        self.held.clear()
        self.received += len(payload)
        self.read = self.received
