"""Where do both streams of a channel stand: what is unsent, on its way, read, and not yet read?"""

WINDOW_BYTES = 256 * 1024  # on their way: said, and not known to have been read
HELD_BYTES_MAX = 2 * WINDOW_BYTES  # of a protocol that does not read; nobody may send more than a window
BUFFER_BYTES = 64 * 1024  # unsent, beyond which the protocol is asked to pause


class SendWindow:
    """The stream to the other side, in bytes."""

    __slots__ = ("acknowledged", "buffer", "high", "low", "paused", "sent")

    def __init__(self) -> None:
        self.buffer = bytearray()  # not yet sent
        self.sent = 0
        self.acknowledged = 0  # how many of those the other side has read
        self.paused = False  # the protocol was asked to write no more
        self.high, self.low = BUFFER_BYTES, BUFFER_BYTES // 4

    @property
    def written(self) -> int:
        """How many bytes were written, sent or not."""
        return self.sent + len(self.buffer)

    def take(self, most: int) -> bytes:
        """Return what may be sent next, at most so many bytes; nothing where the window is full, or all is sent."""
        room = min(WINDOW_BYTES - (self.sent - self.acknowledged), most)
        if room <= 0 or not self.buffer:
            return b""
        payload = bytes(self.buffer[:room])
        del self.buffer[:room]
        return payload

    def limit(self, high: int | None, low: int | None) -> None:
        """Ask for a pause beyond `high` bytes that are unsent, and for more at `low`; None: asyncio's usual share."""
        self.high = BUFFER_BYTES if high is None else high
        self.low = self.high // 4 if low is None else low


class ReceiveWindow:
    """The stream from the other side, in bytes."""

    __slots__ = ("held", "read", "reading", "received", "said_read")

    def __init__(self) -> None:
        self.held = bytearray()  # received, and not yet read by the protocol
        self.received = 0
        self.read = 0
        self.said_read = 0  # how many the other side was told of
        self.reading = True

    @property
    def due(self) -> bool:
        """Whether the other side should be told how much was read, lest it run out of window."""
        return self.read - self.said_read >= WINDOW_BYTES // 4

    def take(self, payload: bytes) -> bool:
        """Hold what has come until the protocol reads. False: it is more than the other side may send."""
        self.received += len(payload)
        self.held += payload
        return len(self.held) <= HELD_BYTES_MAX

    def hand_on(self) -> bytes:
        """Return all that is held; it is read now."""
        payload = bytes(self.held)
        self.held.clear()
        self.read += len(payload)
        return payload

    def drop(self, payload: bytes = b"") -> None:
        """Read no more: what is held, and what has come, counts as read."""
        self.held.clear()
        self.received += len(payload)
        self.read = self.received
