"""Feeds workers' KV events from the broker into a frontend's KV index, and fetches missed events.

kv.events.*  ──▶ KvView ──▶ index
kv.ask.…     ◀── due queries, at most 16 at once, each with a deadline

A query requests missed KV events, or a dump of all blocks, from the worker that published them. The KvView decides which
queries are due.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from math import inf

import msgspec
import structlog

from controller.router.endpoints import WorkerRank
from controller.router.index.view import KvView
from events import kv, subjects
from events.intrusion.send_budget import SubjectBudgets, TrafficLimit, traffic
from events.nats.connection import DISCONNECTED, BrokerConnection, when_connected
from events.observations import WorkerJoined

SENDERS_MAX = 65_536
ASKS_MAX = 16  # maximum number of concurrent queries
ASK_S = 2.0  # timeout of a query
SWEEP_RUNS = 200  # number of index entries that are freed at once
SWEEP_S = 0.005  # wait before more index entries are freed
# KV-event batches of one worker, which sends at most one per engine step and rank
BATCHES = traffic(per_s=2_000.0, burst=20_000.0, mb_per_s=8.0, mb_burst=64.0)
LOOK_S = 1.0  # interval at which the index is checked for entries to free

log = structlog.get_logger(__name__)


class KvEvents:
    """Keeps the KV index of one frontend up to date with the KV events from the broker.

    The class needs its own connection to the broker, so that a burst of events does not delay other traffic. `run` must run on
    the frontend's event loop, and all other methods must be called on that loop. Before `run` has started, and while the broker
    is unavailable, the index keeps its contents.
    """

    def __init__(
        self, connection: BrokerConnection, *, ask_s: float = ASK_S, limit: TrafficLimit = BATCHES
    ) -> None:
        """Build the feed over `connection`. The feed keeps its index in its attribute `view`.

        `ask_s` is the timeout of a query in seconds. `limit` is the traffic that one worker may publish.
        """
        self.view = KvView()
        self.bad = 0  # number of messages that were dropped because they are invalid or exceed the limit
        # called with the name of a worker that exceeds its limit
        self.flooded: Callable[[str], None] = lambda worker: None
        self._budgets = SubjectBudgets(limit, SENDERS_MAX)
        self._connection = connection
        self._ask_s = ask_s
        self._loop = asyncio.get_running_loop()
        self._places = asyncio.Semaphore(ASKS_MAX)
        self._wake = asyncio.Event()  # set when a query may be due
        self._look_at = inf  # loop time at which `run` checks for due queries even if it is not woken
        connection.listen(self._changed)

    @classmethod
    async def open(
        cls, url: str, name: str, *, wait_s: float = 2.0, limit: TrafficLimit = BATCHES
    ) -> "KvEvents":
        """Connect to the broker and build the feed. Raise BadBrokerUrl if `url` is invalid.

        If the broker is not connected within `wait_s` seconds, the returned feed continues to connect in the background.
        """
        return cls(await BrokerConnection.open(url, f"kv:{name}", wait_s=wait_s), limit=limit)

    async def close(self) -> None:
        """Close the broker connection."""
        await self._connection.close()

    # --- interface of routers

    def absorb(self, joined: Iterable[WorkerJoined]) -> None:
        """Set the live workers. The index follows those that publish KV events, and drops the blocks of all others.

        The call is cheap, so it can be made after every change of the fleet.
        """
        self.view.absorb(joined, self._loop.time())
        self._look()

    # --- the service

    async def run(self) -> None:
        """Receive KV events and send due queries, until cancelled."""
        await when_connected(partial(self._connection.subscribe_raw, subjects.KV_EVENTS, self._on_batch))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep(), name="kv-sweep")
            while True:
                await self._connection.up.wait()
                await self._places.acquire()
                if (due := self.view.due(self._loop.time())) is not None:
                    group.create_task(self._ask(*due))
                    continue
                self._places.release()
                await self._until_due()

    async def _until_due(self) -> None:
        self._wake.clear()
        self._look_at = self.view.due_at
        timer = None if self._look_at == inf else self._loop.call_at(self._look_at, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _look(self) -> None:
        """Wake `run` if a query becomes due before `run` would wake by itself."""
        if self.view.due_at < self._look_at:
            self._wake.set()

    async def _ask(self, holder: WorkerRank, ask: kv.KvRequest) -> None:
        answer = None
        subject = subjects.kv_ask(holder.worker, holder.instance)
        try:
            answer = kv.answer((await self._connection.request(subject, kv.encode(ask), self._ask_s)).body)
        except msgspec.MsgspecError as error:
            self.bad += 1
            log.warning("kv_answer_refused", worker=holder.worker, error=str(error))
        except DISCONNECTED as error:
            log.debug("kv_not_answered", worker=holder.worker, rank=holder.rank, error=repr(error))
        finally:
            self._places.release()
            self.view.answer(holder, ask, answer, self._loop.time())
            self._look()

    async def _sweep(self) -> None:
        """Free the index entries of workers that are gone, in small steps that do not delay the streams on this loop."""
        index = self.view.index
        while True:  # noqa: ASYNC110 (polling once a second is cheaper than an event)
            await asyncio.sleep(SWEEP_S if index.sweep(SWEEP_RUNS) else LOOK_S)

    def _within_budget(self, subject: bytes, size: int) -> bool:
        def flooded() -> None:
            self.flooded(subject.decode("utf-8", "replace").rpartition(".")[2])

        if self._budgets.admits(subject, size, self._loop.time(), flooded):
            return True
        self.bad += 1
        return False

    def _on_batch(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        if not self._within_budget(subject, len(body)):
            return
        try:
            batch = kv.batch(body)
            if subject.decode() != subjects.kv_events(batch.worker):
                raise msgspec.ValidationError(f"it is about {batch.worker}")
        except (msgspec.MsgspecError, UnicodeError) as error:
            self.bad += 1
            log.warning("kv_batch_refused", subject=subject.decode(errors="replace"), error=str(error))
            return
        self.view.take(batch, self._loop.time())
        self._look()

    def _changed(self, connected: bool) -> None:
        if connected:
            self.view.doubt(self._loop.time())
            self._look()
