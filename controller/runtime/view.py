"""A process's view of the fleet: the state folded from a snapshot and the journal's later events.

The snapshot comes from the state store. All components that need the fleet (the router, the canary loop, liveness, the actuator,
metrics) subscribe to a view. While the broker is unavailable, the view keeps its last state, or uses the state store's snapshot
and events. If the journal is not the one that the state store has folded, the view reports an error. It keeps its state, because
requests must be served even if the control plane fails.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import structlog

from controller.deciders.fleet import Fleet, evolve
from controller.ports import ReadPosition, StateStore
from controller.runtime.initial_fold import (
    LOAD_DEADLINE_S,
    FleetFold,
    StoredHistory,
    begin,
    by_the_store,
    join,
)
from events.errors import HoldfastError
from events.fact import Recorded
from events.journal.port import Journal, JournalUnavailable
from events.order import Order, OutOfOrder, Position

ASK_END_DEADLINE_S = 2.0
AUDIT_EVERY_S = 5.0
STORE_SUFFICES_AFTER_S = 3.0  # time without the broker after which the store's content is used

Batch = Sequence[Recorded]
log = structlog.get_logger(__name__)


class FleetSource(Protocol):
    """The part of a view that gives the fleet's present state."""

    @property
    def fleet(self) -> Fleet: ...


class View(FleetSource, Protocol):
    """The interface of a view: the fleet, the number of the last decision, and notifications of new events."""

    @property
    def number(self) -> int: ...
    def listen(self, callback: Callable[[object, Batch], None]) -> None:
        """Call `callback(view, batch)` after the events in `batch` have been folded."""


class ViewNotReady(HoldfastError):
    """The fleet is not known yet: neither the journal nor the state store has been read to its end."""


class FleetView(FleetFold):
    """The folded fleet state of one process. Follows the journal, and notifies listeners of each list of folded events."""

    def __init__(
        self,
        journal: Journal,
        *,
        store: StoredHistory | None = None,
        store_suffices_after_s: float = STORE_SUFFICES_AFTER_S,
        audit_every_s: float = AUDIT_EVERY_S,
    ) -> None:
        super().__init__(Order(evolve, Fleet()))
        self.fault: HoldfastError | None = None  # the error that ended following; None: it follows
        self._journal = journal
        self._store = store
        self._store_suffices_after_s = store_suffices_after_s
        self._audit_every_s = audit_every_s
        self._began_at: ReadPosition | None = None  # the store's position when the view started
        self._behind: Order[Fleet] | None = None  # the journal's fold, while the store's fold is ahead of it
        self._ready = False
        self._verified = False  # whether the stream is the one that the store has folded
        self._outcome_known = asyncio.Event()  # set once the view is ready or following has failed
        self._target: int | None = None  # the last sequence of the stream when the view started
        self._listeners: list[Callable[[FleetView, Batch], None]] = []

    @property
    def is_ready(self) -> bool:
        """Whether the view has read everything that the journal held when the view started.

        If the broker is unavailable, it suffices that the state store was read.
        """
        return self._ready

    def listen(self, callback: Callable[["FleetView", Batch], None]) -> None:
        """Call `callback(view, batch)` after the events in `batch` have been folded. Callbacks run in the order of registration.

        `batch` is empty if the view's state was replaced.
        """
        self._listeners.append(callback)

    async def ready(self, deadline_s: float) -> None:
        """Wait until the view is ready.

        Raise ViewNotReady if it is not ready after `deadline_s` seconds. If an error has ended `run` before, raise that error.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._outcome_known.wait()
        except TimeoutError:
            raise ViewNotReady(f"after {deadline_s:g} s: {ViewNotReady.__doc__}") from None
        if self.fault is not None and not self.is_ready:
            raise self.fault

    async def run(self) -> None:
        """Follow the journal until cancelled.

        Raise UnknownKind, OutOfOrder, StoreAhead or JournalChanged. The state is then kept, and another call of `run` continues
        from it.
        """
        try:
            if self._began_at is None:
                self.order, self._began_at = await begin(self._store)
                self._notify(())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._find_end())
                order = await join(self._journal, self._began_at, self._behind or self.order)
                if self._behind is not None:
                    self._behind = order
                elif order is not self.order:  # the journal has dropped the next events of the previous fold
                    log.warning("view_begins_on_the_journal", held=self.seq, begins=order.last_seq)
                    self.order = order
                    self._notify(())
                self._verified = True
                self._check_ready()
                if self._store is not None:
                    tasks.create_task(self._audit(self._store))
                await self._follow()
        except HoldfastError as error:
            self._fail(error)
            raise
        except BaseExceptionGroup as group:
            first = next((e for e in group.exceptions if isinstance(e, HoldfastError)), None)
            if first is None:
                raise
            self._fail(first)
            raise first from None

    def _fail(self, error: HoldfastError) -> None:
        known, self.fault = str(self.fault), error
        self._outcome_known.set()
        if known != str(error):
            log.error("view_stopped", seq=self.seq, why=str(error))

    async def _follow(self) -> None:
        batches: AsyncIterator[Batch] = self._journal.read((self._behind or self.order).last_seq)
        async for batch in batches:
            if self._behind is not None:
                self._catch_up(self._behind, batch)
                continue
            try:
                self.take(batch)
            except OutOfOrder:
                if folded := [event for event in batch if event.seq <= self.seq]:
                    self._after_batch(folded)  # a further call does not read these events again
                raise
            self.fault = None
            self._after_batch(batch)

    def _catch_up(self, behind: Order[Fleet], batch: Batch) -> None:
        """Fold journal events into `behind`, while the view shows the state that came from the store.

        Once `behind` has reached the sequence of the shown state, it replaces the shown state.
        """
        for event in batch:
            behind.take(event)
        if behind.last_seq >= self.seq:
            log.info("view_follows_the_journal_again", held=self.seq, seq=behind.last_seq)
            self.order, self._behind, self.fault = behind, None, None
            self._after_batch(())

    def _after_batch(self, batch: Batch) -> None:
        self._notify(batch)
        self._check_ready()

    async def _find_end(self) -> None:
        """Query the stream's last sequence, up to which the view must read to be ready.

        A query is needed because an empty stream delivers no event. If the broker does not answer in time, the view's state is
        taken from the state store.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._store_suffices_after_s
        while self._target is None:
            try:
                async with asyncio.timeout(ASK_END_DEADLINE_S):
                    self._target = await self._journal.last_seq()
            except (JournalUnavailable, TimeoutError):
                if not self.is_ready and loop.time() > give_up_at:
                    await self._show_store()
                await asyncio.sleep(0.1)
        self._check_ready()

    async def _show_store(self) -> None:
        """Show the fleet state that is folded from the store's events, as long as the journal cannot be read.

        If any event has been read, from the store or the journal, the view is ready.
        """
        if self._store is not None and self._behind is None:
            try:
                order = await by_the_store(self._store, self.order)
            except (HoldfastError, TimeoutError) as error:
                log.warning("store_history_unreadable", why=str(error))
                order = self.order
            if order.last_seq > self.seq and not self._verified:
                self._behind, self.order = self.order, order
                self._notify(())
        if self.seq:
            log.warning("view_knows_only_the_store", seq=self.seq)
            self._set_ready()

    async def _audit(self, store: StateStore) -> None:
        """Compare the store's snapshot with this view's state as of the last decision, every few seconds.

        At the same position, the snapshot and the view's state are folds of the same facts. So a difference is a bug, and is
        logged.
        """
        compared = Position()
        while True:
            await asyncio.sleep(self._audit_every_s * random.uniform(0.8, 1.2))
            if self.order.position == compared or self.order.lacks:
                continue  # no decision since the last comparison, or this fold is known to lack events
            try:
                async with asyncio.timeout(LOAD_DEADLINE_S):
                    kept = await store.load()
            except (HoldfastError, TimeoutError):
                continue
            if kept is None or kept.position != self.order.position:
                continue
            compared = kept.position
            if kept.fleet != self.order.settled:
                log.error("store_differs", position=compared.decided, number=compared.number)

    def _check_ready(self) -> None:
        if self._behind is None and self._verified and self._target is not None and self.seq >= self._target:
            self._set_ready()

    def _set_ready(self) -> None:
        self._ready = True
        self._outcome_known.set()

    def _notify(self, batch: Batch) -> None:
        for listener in self._listeners:
            listener(self, batch)
