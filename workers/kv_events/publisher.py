"""Publishes the KV blocks that a worker's engine stores and removes, and lets frontends catch up.

The events of one rank within 5 ms form one message, which is sent over the worker's connection to the broker. Publishing never
waits. If the broker is disconnected or too slow, events are dropped, and frontends detect the gap in the event ids. Every rank
also publishes its next event id every 5 s, so that a gap is detected even if no further event is published.
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Sequence

import msgspec
import structlog

from events import kv, subjects
from events.kv import KvEvent, KvRefused, KvRequest
from events.nats.connection import DISCONNECTED, BrokerConnection, Interest
from workers.kv_events.ledger import KvEventLedger, LedgerBounds

FLUSH_S = 0.005  # how long events wait to be sent together with others
NEXT_EVERY_S = 5.0  # how often a rank publishes its next id
SLOT_S = 0.1  # next ids are published at multiples of this, so that workers of one process share a write to the broker
RANKS_MAX = 1024
UNSENT_BYTES_MAX = 4 * 1024 * 1024  # if more bytes wait to be sent to the broker, events are dropped
RETRY_S = 0.2
CLOSE_S = 0.5

log = structlog.get_logger(__name__)


class KvPublisher:
    """Publishes the KV events of a worker instance, for all ranks, and answers frontends' requests for missed events.

    `announce` may be called from any thread, all other methods only on the event loop.
    """

    def __init__(
        self,
        worker: str,
        instance: str,
        connection: BrokerConnection,
        bounds: LedgerBounds | None = None,
        *,
        next_every_s: float = NEXT_EVERY_S,
    ) -> None:
        """Build a publisher for a worker instance. It publishes on `connection` after `start`.

        `bounds` apply to each rank. `next_every_s` is the interval in seconds at which ranks publish their next event id.
        """
        self.worker, self.instance = worker, instance
        self.published = 0  # number of events published to the broker
        self.dropped = 0  # number of events not published because the broker was disconnected or too slow, or a fault muted them
        self._bounds = bounds or LedgerBounds()
        self._muted: Callable[[], bool] = _never
        self._connection = connection
        self._client = connection.client
        self.ledgers: dict[int, KvEventLedger] = {}  # by rank
        # events that wait for the next message: by rank, the id of the first event and the encoded events
        self._waiting: dict[int, tuple[int, list[bytes]]] = {}
        self._ranks = 1
        self._next_every_s = next_every_s
        self._closed = False
        self._route = f"{subjects.kv_events(worker)} ".encode()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        # the subscription to frontends' requests; None until the broker is connected
        self._heard: Interest | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._next_timer: asyncio.TimerHandle | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks in the engine's cache, over all ranks."""
        return sum(map(len, self.ledgers.values()))

    def start(self, ranks: int, muted: Callable[[], bool] | None = None) -> None:
        """Start to publish for ranks 0 to `ranks` - 1. `muted` returns whether an injected fault suppresses all messages."""
        self._ranks = ranks
        self._muted = muted or _never
        self._connection.listen(self._changed)
        self.announce_next()

    async def subscribe(self) -> None:
        """Subscribe to frontends' requests for missed events. If the broker is not connected, wait until it is."""
        subject = subjects.kv_ask(self.worker, self.instance)
        while True:
            try:
                self._heard = await self._connection.subscribe_raw(subject, self._asked)
                return
            except DISCONNECTED:
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Stop publishing events and answering requests.

        When a worker has left, frontends drop its blocks, and so need no more events or answers from it.
        """
        self._closed = True
        self._connection.unlisten(self._changed)
        for timer in (self._flush_timer, self._next_timer):
            if timer is not None:
                timer.cancel()
        if self._heard is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._heard.cancel()

    # --- events from the engine

    def announce(self, rank: int, events: Sequence[KvEvent]) -> None:
        """Publish the KV events of one engine step of `rank`, within 5 ms. May be called from any thread."""
        if threading.get_ident() == self._thread:
            self._publish_later(rank, events)
        else:
            self._loop.call_soon_threadsafe(self._publish_later, rank, events)

    def _publish_later(self, rank: int, events: Sequence[KvEvent]) -> None:
        if self._closed:
            return
        if not 0 <= rank < RANKS_MAX:  # the number may come from an upstream, which may send anything
            self.dropped += len(events)
            return
        first, published = self._ledger(rank).record(events)
        if not published:
            return
        self._waiting.setdefault(rank, (first, []))[1].extend(published)
        if self._flush_timer is None:
            self._flush_timer = self._loop.call_later(FLUSH_S, self.flush)

    def _ledger(self, rank: int) -> KvEventLedger:
        if rank not in self.ledgers:
            self.ledgers[rank] = KvEventLedger(self._bounds)
        return self.ledgers[rank]

    def flush(self) -> None:
        """Publish the waiting events at once, in messages of at most `LedgerBounds.part_bytes` bytes."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        waiting, self._waiting = self._waiting, {}
        for rank, (first, events) in waiting.items():
            while events:
                size, count = len(events[0]), 1
                while count < len(events) and size + len(events[count]) <= self._bounds.part_bytes:
                    size += len(events[count])
                    count += 1
                self._post(rank, first, events[:count])
                first, events = first + count, events[count:]
        self._write()

    def _post(self, rank: int, first: int, events: Sequence[bytes]) -> None:
        body = kv.encode([self.worker, self.instance, rank, first, [msgspec.Raw(event) for event in events]])
        if not self._full() and self._client.post(self._route, b"", body):
            self.published += len(events)
        else:
            self.dropped += len(events)

    def _write(self) -> None:
        """Schedule the write of posted messages to the broker.

        The write runs after the callbacks that are ready now, because a thousand workers may share the connection.
        """
        self._loop.call_soon(self._client.write)

    def _full(self) -> bool:
        return self._muted() or self._client.unsent() > UNSENT_BYTES_MAX

    # --- gap detection by frontends

    def announce_next(self) -> None:
        """Publish the next event id of each rank, and schedule the next publication in `next_every_s` seconds."""
        if self._next_timer is not None:
            self._next_timer.cancel()
        now = self._loop.time()
        slot = math.ceil((now + self._next_every_s) / SLOT_S)
        self._next_timer = self._loop.call_at(slot * SLOT_S, self.announce_next)
        for rank in range(self._ranks):
            ledger = self._ledger(rank)
            ledger.tidy(now)
            if rank not in self._waiting:
                self._post(rank, ledger.next, ())
        self._write()

    def _changed(self, connected: bool) -> None:
        if connected and self._next_timer is not None:
            self.announce_next()

    def _asked(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        if not reply or self._muted():
            return
        try:
            answer = self.answer(kv.ask(body))
        except msgspec.MsgspecError as error:
            answer = kv.encode(KvRefused(f"not a KV request: {error}"))
        self._client.post(reply + b" ", b"", answer)
        self._write()

    def answer(self, ask: KvRequest) -> bytes:
        """Return the encoded answer to a frontend's request. The answer is a refusal if the rank does not exist."""
        if not 0 <= ask.rank < self._ranks:
            return kv.encode(KvRefused(f"rank {ask.rank} does not exist: this worker has {self._ranks}"))
        return self._ledger(ask.rank).answer(ask, self._loop.time())


def _never() -> bool:
    return False
