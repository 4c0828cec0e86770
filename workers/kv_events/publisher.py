"""A worker says which KV blocks its engine has stored and removed, and answers frontends that have missed something.

What the steps of a few milliseconds have changed goes out as one message per rank, on the worker's connection to the broker.
Nothing waits for it: without a broker, or where it does not take what is sent, events are dropped, and frontends find the
gap in the ids. So that they find it also where nothing follows, every rank says now and then which id comes next.
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

FLUSH_S = 0.005  # events wait so long for others to go with
NEXT_EVERY_S = 5.0  # how often a rank says which id comes next
SLOT_S = 0.1  # many workers of a process do so in one turn of the loop, and one write
RANKS_MAX = 1024
UNSENT_BYTES_MAX = 4 * 1024 * 1024  # that the broker has not taken: beyond, events are dropped
RETRY_S = 0.2
CLOSE_S = 0.5

log = structlog.get_logger(__name__)


class KvPublisher:
    """The KV events of one life of a worker, all ranks together. `announce` may be called from any thread."""

    def __init__(
        self,
        worker: str,
        instance: str,
        connection: BrokerConnection,
        bounds: LedgerBounds | None = None,
        *,
        next_every_s: float = NEXT_EVERY_S,
    ) -> None:
        """Publish for this life of a worker, on this connection to the broker. `bounds` are those of each rank; `next_every_s`:
        how often every rank says which id comes next."""
        self.worker, self.instance = worker, instance
        self.said = 0  # events that were given to the broker
        self.dropped = 0  # events that were not: it was away, or did not take them
        self._bounds = bounds or LedgerBounds()
        self._muted: Callable[[], bool] = _never
        self._connection = connection
        self._client = connection.client
        self._ledgers: dict[int, KvEventLedger] = {}
        self._waiting: dict[int, tuple[int, list[bytes]]] = {}  # by rank: the first id, and events from it on
        self._ranks = 1
        self._next_every_s = next_every_s
        self._over = False
        self._route = f"{subjects.kv_events(worker)} ".encode()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._heard: Interest | None = None  # what frontends ask
        self._flushing: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None

    @property
    def blocks(self) -> int:
        """How many blocks the engine holds, over all ranks."""
        return sum(map(len, self._ledgers.values()))

    @property
    def dumps(self) -> int:
        """How many dumps are kept whose parts are still to be asked for, over all ranks."""
        return sum(ledger.dumps for ledger in self._ledgers.values())

    @property
    def refused(self) -> int:
        """Events that contradicted what the engine had said before, and were said to nobody."""
        return sum(ledger.refused for ledger in self._ledgers.values())

    def start(self, ranks: int, muted: Callable[[], bool] | None = None) -> None:
        """Publish for so many ranks from now on. `muted` says whether a rehearsed fault wants nothing to be heard."""
        self._ranks = ranks
        self._muted = muted or _never
        self._connection.listen(self._changed)
        self.tell()

    async def hear(self) -> None:
        """Answer questions from now on, or as soon as there is a broker to hear them from."""
        subject = subjects.kv_ask(self.worker, self.instance)
        while True:
            try:
                self._heard = await self._connection.subscribe_raw(subject, self._asked)
                return
            except DISCONNECTED:
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Say no more, and answer nothing: who is gone holds no blocks."""
        self._over = True
        self._connection.unlisten(self._changed)
        for timer in (self._flushing, self._telling):
            if timer is not None:
                timer.cancel()
        if self._heard is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._heard.cancel()

    # --- what the engine announces

    def announce(self, rank: int, events: Sequence[KvEvent]) -> None:
        """Take in what a step has changed."""
        if threading.get_ident() == self._thread:
            self._take(rank, events)
        else:
            self._loop.call_soon_threadsafe(self._take, rank, events)

    def _take(self, rank: int, events: Sequence[KvEvent]) -> None:
        if self._over:
            return
        if not 0 <= rank < RANKS_MAX:  # an upstream may say anything
            self.dropped += len(events)
            return
        first, said = self._ledger(rank).say(events)
        if not said:
            return
        self._waiting.setdefault(rank, (first, []))[1].extend(said)
        if self._flushing is None:
            self._flushing = self._loop.call_later(FLUSH_S, self.flush)

    def _ledger(self, rank: int) -> KvEventLedger:
        ledger = self._ledgers.get(rank)
        if ledger is None:
            ledger = self._ledgers[rank] = KvEventLedger(self._bounds)
        return ledger

    def flush(self) -> None:
        """Say at once what waits for others to go with."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
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
            self.said += len(events)
        else:
            self.dropped += len(events)

    def _write(self) -> None:
        """Write what is posted when everybody has had their turn: a thousand workers share the connection."""
        self._loop.call_soon(self._client.write)

    def _full(self) -> bool:
        return self._muted() or self._client.unsent() > UNSENT_BYTES_MAX

    # --- what keeps frontends complete

    def tell(self) -> None:
        """Say which id comes next, now and every so often from now on."""
        if self._telling is not None:
            self._telling.cancel()
        now = self._loop.time()
        slot = math.ceil((now + self._next_every_s) / SLOT_S)
        self._telling = self._loop.call_at(slot * SLOT_S, self.tell)
        for rank in range(self._ranks):
            ledger = self._ledger(rank)
            ledger.tidy(now)
            if rank not in self._waiting:
                self._post(rank, ledger.next, ())
        self._write()

    def _changed(self, connected: bool) -> None:
        if connected and self._telling is not None:
            self.tell()

    def _asked(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        if not reply or self._muted():
            return
        try:
            answer = self.answer(kv.ask(body))
        except msgspec.MsgspecError as error:
            answer = kv.encode(KvRefused(f"this is no question: {error}"))
        self._client.post(reply + b" ", b"", answer)
        self._write()

    def answer(self, ask: KvRequest) -> bytes:
        """Return the answer to a frontend's question, encoded."""
        if not 0 <= ask.rank < self._ranks:
            return kv.encode(KvRefused(f"there is no rank {ask.rank}: this worker has {self._ranks}"))
        return self._ledger(ask.rank).answer(ask, self._loop.time())


def _never() -> bool:
    return False
