"""The stored responses of one frontend, bounded by number, bytes and age."""

import msgspec

from controller.frontend.metrics import StoredResponseMetrics
from controller.frontend.settings import StoredResponseSettings

MIB = 2**20


class StoredResponse(msgspec.Struct, frozen=True):
    """A response with its conversation, as kept and as sent to another frontend."""

    id: str
    owner: str  # name of the API key that created it; empty without API keys
    body: bytes  # the response as JSON
    turns: bytes = b"[]"  # the conversation with the answer and without instructions, as JSON
    ended: bool = True  # whether the response has ended; only ended responses can be continued

    @property
    def size(self) -> int:
        """Number of bytes that count against the limit."""
        return len(self.body) + len(self.turns)


class ResponseStore:
    """Keeps responses, and drops the oldest ones at a limit."""

    def __init__(self, limits: StoredResponseSettings, metrics: StoredResponseMetrics) -> None:
        """Start empty."""
        self._limits = limits
        self._metrics = metrics
        self._kept: dict[str, tuple[StoredResponse, float]] = {}  # each with its time, oldest first
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, stored: StoredResponse, now: float) -> None:
        """Keep a response. `now` is in monotonic seconds."""
        self.remove(stored.id)
        self._kept[stored.id] = stored, now
        self._bytes += stored.size
        while len(self._kept) > self._limits.number_max:
            self._drop("number")
        while self._bytes > self._limits.mb_max * MIB:
            self._drop("bytes")
        self._count()

    def get(self, id: str) -> StoredResponse | None:
        """Return a response, or None if it is not kept."""
        found = self._kept.get(id)
        return None if found is None else found[0]

    def remove(self, id: str) -> None:
        """Remove a response, if it is kept."""
        found = self._kept.pop(id, None)
        if found is not None:
            self._bytes -= found[0].size
            self._count()

    def expire(self, now: float) -> None:
        """Drop the responses that are too old."""
        before = len(self._kept)
        while self._kept and now - next(iter(self._kept.values()))[1] > self._limits.keep_s:
            self._drop("age")
        if len(self._kept) != before:
            self._count()

    def _drop(self, why: str) -> None:
        self._metrics.dropped.labels(why).inc()
        stored, _ = self._kept.pop(next(iter(self._kept)))
        self._bytes -= stored.size

    def _count(self) -> None:
        self._metrics.number.set(len(self._kept))
        self._metrics.bytes.set(self._bytes)
