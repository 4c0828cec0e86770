"""The projector: folds the journal and writes the result to the state store, each event exactly once.

    journal ── read ──▶ fold ──▶ gathered ──▶ project (one transaction) ──▶ gathered meanwhile …

Reading and folding continue during a transaction, and the events that are folded meanwhile are written by the next transaction.
So transactions grow with the load, and a single event is written without delay. The projector keeps no state outside the store.
After any failure it reads its position from the store and restarts there. So the process can be killed at any step.

Failures that a retry cannot fix are raised: a store that is ahead of the stream or has lost rows, a recreated stream, or an event
of an unknown kind. The projector checks for lost rows before each start and every 30 s.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import structlog

from controller.deciders.fleet import Fleet
from controller.metric_table import MetricTable, counter, gauge, histogram
from controller.ports import (
    AnotherProjector,
    ReadPosition,
    Snapshot,
    StateStore,
    StoreForbidden,
    StoreLost,
    StoreRefused,
    StoreUnavailable,
)
from controller.read_model.rows import audited
from controller.runtime.bounded_read import history
from controller.runtime.initial_fold import oldest, order_from, refuse_foreign_stream, snapshots
from events.fact import Recorded
from events.journal.port import Journal, JournalChanged, JournalUnavailable
from events.order import Order

BATCHES = (1, 2, 5, 10, 50, 100, 500, 1_000, 5_000, 10_000)


class ProjectorMetrics(MetricTable):
    """The projector's metrics, in the registry of its process."""

    position = gauge("holdfast_projector_position", "Stream sequence of the last event in the state store")
    lag = gauge("holdfast_projector_lag", "Journal events that are not in the state store yet")
    events = counter("holdfast_projector_events", "Events projected by this process")
    restarts = counter(
        "holdfast_projector_restarts",
        "Times the projector restarted from the store's position, after a failure or another projector",
    )
    skipped = counter(
        "holdfast_journal_skipped", "Invalid messages on the journal that this process has skipped"
    )
    batch = histogram("holdfast_projector_batch_events", "Events per transaction", bounds=BATCHES)

    def written(self, seq: int, events: int) -> None:
        """Record a committed transaction of `events` events that ends with stream sequence `seq`."""
        self.position.set(seq)
        self.events.inc(events)
        self.batch.observe(events)


GATHER_MAX = 8_192  # events folded but not yet written; at this number the reader waits
GATHER_HISTORY = 4_096  # events of a transaction while catching up, where latency does not matter
CHECK_S = 10.0  # time limit of the comparison of store and stream
LOOK_EVERY_S = 30.0  # interval of the check of the store for lost rows
WRITE_S = 120.0  # time limit of a transaction
WAIT_MIN_S = 0.05  # first wait after a failure; doubles with each further failure
WAIT_MAX_S = 2.0
YIELD_S = 1.0  # pause after which another projector should have proceeded

log = structlog.get_logger()


@dataclass
class Gathered:
    """The queue from the reader to the writer: events that are folded and not written yet."""

    events: list[Recorded] = field(default_factory=list)
    grown: asyncio.Event = field(default_factory=asyncio.Event)  # set when events can be written
    taken: asyncio.Event = field(default_factory=asyncio.Event)  # set when the writer has taken the events


@dataclass
class Progress:
    """The projector's progress, for metrics and readiness."""

    projected: int = 0  # the sequence of the last event in the rows
    batches: int = 0  # number of transactions
    events: int = 0  # number of events written
    restarts: int = 0
    connected: bool = False  # whether store and journal answered since the last failure


@dataclass(eq=False)
class Projector:
    """Follows a journal, and projects its events into a state store."""

    journal: Journal
    store: StateStore
    _: KW_ONLY
    written: Callable[[int, int], None] = lambda seq, events: None
    look_every_s: float = LOOK_EVERY_S

    def __post_init__(self) -> None:
        self.progress = Progress()

    async def run(self) -> None:
        """Project until cancelled, and restart after failures that a retry can fix.

        Raise StoreAhead, StoreLost, JournalChanged, UnknownKind or OutOfOrder. After such an error an operator must act.
        """
        wait_s = WAIT_MIN_S
        while True:
            before = self.progress.batches
            try:
                await self.catch_up(None)
            except StoreForbidden:
                raise
            # a table was lost, because all tables existed when this process started
            except StoreRefused as error:
                raise StoreLost(
                    f"tables are missing: {error.__cause__ or error}. {StoreLost.__doc__}"
                ) from error
            except AnotherProjector as error:
                log.info("another_projector", reason=str(error))
                await asyncio.sleep(random.uniform(YIELD_S, 2 * YIELD_S))
            except (StoreUnavailable, JournalUnavailable, TimeoutError) as error:
                log.warning("projector_waits", reason=str(error) or "out of time", wait_s=wait_s)
                wait_s = WAIT_MIN_S if self.progress.batches > before else min(wait_s * 2, WAIT_MAX_S)
                await asyncio.sleep(random.uniform(wait_s / 2, wait_s))
            self.progress.connected = False
            self.progress.restarts += 1

    async def catch_up(self, until: int | None) -> None:
        """Project all events up to stream sequence `until`. If `until` is None, follow the journal without end.

        Failures are raised, not retried.
        """
        position = await self._begin()
        if until is not None and position.seq >= until:
            return
        order = await self._from_snapshot(position)
        gathered = Gathered()
        works = [
            self._read(order, position, gathered, until),
            self._write(order, gathered, position.seq, until),
        ]
        await _run_all(*works, *([self._check_losses()] if until is None else []))

    async def _begin(self) -> ReadPosition:
        """Read the store's position, and check that the store has folded this stream and has lost no rows."""
        async with asyncio.timeout(CHECK_S):
            position = await self.store.position()
            await refuse_foreign_stream(self.journal, position)
            await refuse_lost_rows(self.journal, self.store)
        self.progress.projected = position.seq
        self.progress.connected = True
        return position

    async def _check_losses(self) -> None:
        """Check periodically that the store still has the projected rows. Raise StoreLost if rows are missing."""
        while True:
            await asyncio.sleep(self.look_every_s)
            async with asyncio.timeout(CHECK_S):
                await refuse_lost_rows(self.journal, self.store)

    async def _from_snapshot(self, position: ReadPosition) -> Order[Fleet]:
        """Return the fleet state to continue from: the store's snapshot, or a snapshot on the journal.

        A snapshot on the journal is used if the journal has dropped the event after the store's snapshot. Raise StoreLost if
        the journal has dropped events that the store has not projected.
        """
        snapshot = await self.store.load()
        order = order_from(snapshot if snapshot is not None and _reach(snapshot) <= position.seq else None)
        first = await self.journal.first_seq()
        if first <= order.last_seq + 1:
            return order
        if not position.seq:
            return order_from(await oldest(self.journal, 0))
        kept = [s async for _, s in snapshots(self.journal) if _reach(s) <= position.seq]
        if not kept:
            raise StoreLost(
                f"the journal begins at {first}, and the store was projected to {position.seq}. {StoreLost.__doc__}"
            )
        return order_from(kept[-1])

    async def _read(
        self, order: Order[Fleet], position: ReadPosition, gathered: Gathered, until: int | None
    ) -> None:
        journal, after = self.journal, order.position.through
        enough = 1 if until is None else GATHER_HISTORY
        async for batch in journal.read(after) if until is None else history(journal, after, until):
            while len(gathered.events) >= GATHER_MAX:
                gathered.taken.clear()
                await gathered.taken.wait()
            for event in batch:
                order.take(event)
            gathered.events.extend(e for e in batch if e.seq > position.seq)
            if len(gathered.events) >= enough:
                gathered.grown.set()
        gathered.grown.set()

    async def _write(self, order: Order[Fleet], gathered: Gathered, after: int, until: int | None) -> None:
        while True:
            await gathered.grown.wait()
            gathered.grown.clear()
            if not gathered.events:
                return  # the reader has finished
            events, gathered.events = gathered.events, []
            gathered.taken.set()
            shown, settled = order.shown, Snapshot(order.settled, order.position, dict(order.sources))
            async with asyncio.timeout(WRITE_S):
                await self.store.project(events, shown, settled, after)
            after = events[-1].seq
            self._count(events)
            if until is not None and events[-1].seq >= until:
                return

    def _count(self, events: list[Recorded]) -> None:
        progress = self.progress
        progress.projected = events[-1].seq
        progress.batches += 1
        progress.events += len(events)
        self.written(progress.projected, len(events))


def _reach(snapshot: Snapshot) -> int:
    return max(snapshot.position.decided, snapshot.position.through)


async def _run_all(*works: Coroutine[Any, Any, None]) -> None:
    """Run all coroutines until one fails or all have ended. A failure cancels the others and is raised.

    If several fail, a failure that a retry cannot fix takes precedence. Among equal failures, that of the first coroutine is
    raised.

    An asyncio TaskGroup is not used, because of two defects in Python 3.11. If a group is cancelled at the moment in which one of
    its tasks fails, it raises only the failure. A caller that retries after a failure would then miss its own cancellation. And
    a group that fails while it waits leaves its caller marked as cancelled, so the caller cannot distinguish a failure from a
    cancellation.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [e for e in ends if isinstance(e, BaseException) and not isinstance(e, asyncio.CancelledError)]
    retried = (StoreUnavailable, JournalUnavailable, TimeoutError)
    if failures:
        raise next((e for e in failures if not isinstance(e, retried)), failures[0])


READ_MAX = 1_000  # number of journal events to check, at the start and at the end of the store's rows


async def refuse_lost_rows(journal: Journal, store: StateStore) -> None:
    """Raise StoreLost if the store lacks rows that it must have.

    Raise StoreUnavailable or JournalUnavailable if the store or the journal does not answer.
    """
    position, look = await store.position(), await store.look()
    lost = list(look.lost)
    last = max(look.last, position.seq - READ_MAX)
    if "projection" not in lost and (
        await _lacks(journal, store, 0, min(look.first - 1, READ_MAX))
        or await _lacks(journal, store, last, position.seq)
    ):
        lost.append("fleet_events")
    if lost:
        raise StoreLost(f"rows are missing from {', '.join(lost)}. {StoreLost.__doc__}")


async def _lacks(journal: Journal, store: StateStore, after: int, until: int) -> bool:
    """Return whether an event that the store must have is missing, after `after` up to and including `until`.

    Events are looked up by id, because an event that was published twice is stored under its first sequence.
    """
    try:
        async for batch in history(journal, after, until):
            for event in batch:
                if audited(event.fact) and await store.locate(event.id) is None:
                    return True
    except JournalChanged:  # the journal has just dropped these events
        return False
    return False
