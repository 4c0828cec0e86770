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
from events.connection import DISCONNECTED, Connection, Interest
from events.kv import Ask, KvEvent, Refused
from workers.kv_ledger import PART_BYTES, Ledger

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

    def __init__(self, worker: str, instance: str, connection: Connection) -> None:
        self.worker, self.instance = worker, instance
        self.said = 0  # events that were given to the broker
        self.dropped = 0  # events that were not: it was away, or did not take them
        self.muted: Callable[[], bool] = _never  # a rehearsed fault may want nothing to be heard
        self._connection = connection
        self._client = connection.client
        self._ledgers: dict[int, Ledger] = {}
        self._waiting: dict[int, tuple[int, list[bytes]]] = {}  # by rank: the first id, and events from it on
        self._ranks = 1
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
    def refused(self) -> int:
        """Events that contradicted what the engine had said before, and were said to nobody."""
        return sum(ledger.refused for ledger in self._ledgers.values())

    def start(self, ranks: int) -> None:
        """Publish for so many ranks from now on."""
        self._ranks = ranks
        self._connection.listen(self._changed)
        self._tell()

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
            self._flushing = self._loop.call_later(FLUSH_S, self._flush)

    def _ledger(self, rank: int) -> Ledger:
        ledger = self._ledgers.get(rank)
        if ledger is None:
            ledger = self._ledgers[rank] = Ledger()
        return ledger

    def _flush(self) -> None:
        self._flushing = None
        waiting, self._waiting = self._waiting, {}
        for rank, (first, events) in waiting.items():
            while events:
                size, count = len(events[0]), 1
                while count < len(events) and size + len(events[count]) <= PART_BYTES:
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
        return self.muted() or self._client.unsent() > UNSENT_BYTES_MAX

    # --- what keeps frontends complete

    def _tell(self) -> None:
        """Say which id comes next."""
        now = self._loop.time()
        slot = math.ceil((now + NEXT_EVERY_S) / SLOT_S)
        self._telling = self._loop.call_at(slot * SLOT_S, self._tell)
        for rank in range(self._ranks):
            ledger = self._ledger(rank)
            ledger.tidy(now)
            if rank not in self._waiting:
                self._post(rank, ledger.next, ())
        self._write()

    def _changed(self, connected: bool) -> None:
        if connected and self._telling is not None:
            self._telling.cancel()
            self._tell()

    def _asked(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        if not reply or self.muted():
            return
        try:
            answer = self._answer(kv.ask(body))
        except msgspec.MsgspecError as error:
            answer = kv.encode(Refused(f"this is no question: {error}"))
        self._client.post(reply + b" ", b"", answer)
        self._write()

    def _answer(self, ask: Ask) -> bytes:
        if not 0 <= ask.rank < self._ranks:
            return kv.encode(Refused(f"there is no rank {ask.rank}: this worker has {self._ranks}"))
        return self._ledger(ask.rank).answer(ask, self._loop.time())


def _never() -> bool:
    return False
