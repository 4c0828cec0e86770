"""The controller's main loop: reads the journal, and appends the due decisions atomically.

    journal ─▶ order ─▶ settle ─▶ append (fenced) ─▶ journal
                  ▲                     │
                  └──── read again ◀────┴── Fenced, or the outcome is unknown

To settle is to compute all decisions that are due in the fleet state. The reconciler folds only events that it has read from
the stream, never events that it expects to have appended. So no state needs to be undone after an append that was rejected
(fenced), or that has an unknown outcome. The reconciler then reads to the end of the stream and settles again. A standby also
reads and folds, but does not decide, so it can take over at once.

The loop settles whenever it has read something new. It also settles every `ask_s`, because decisions can become due by time
alone. If no decision can be due, `SettleCache` returns without settling.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta

import structlog

from controller.deciders.fleet import Fleet, FleetPolicy, SettleCache, absorbed, absorption_due, evolve
from controller.ports import Clock, StateStore
from controller.runtime.bounded_read import pause
from controller.runtime.initial_fold import begin, join
from controller.runtime.lease import Lease
from events.codec import to_builtins
from events.errors import HoldfastError
from events.fact import Decision
from events.journal.port import Fenced, Journal, JournalUnavailable
from events.order import Order
from events.versions import InForce

ASK_S = 0.2  # maximum delay of a decision that becomes due by time alone
BUSY_SHARE = 0.5  # largest share of time spent on settling, so that facts gather between two runs
APPEND_MAX = 1000  # decisions appended atomically at once, which is the broker's limit
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.05, 2.0

log = structlog.get_logger(__name__)


@dataclass
class ReconcilerCounters:
    """Totals since the reconciler's start, which are exported as metrics."""

    settles: int = 0
    decisions: int = 0
    settle_s: float = 0.0  # seconds spent on settling


@dataclass(eq=False)
class Reconciler:
    """Reads and folds the journal, and decides while this controller holds the lease."""

    journal: Journal
    lease: Lease
    policy: FleetPolicy
    clock: Clock
    _: KW_ONLY
    store: StateStore | None = None
    ask_s: float = ASK_S
    append_max: int = APPEND_MAX
    # returns the kinds and deciders version to put in force now; None: no change
    force: Callable[[Fleet], InForce | None] = lambda fleet: None

    def __post_init__(self) -> None:
        self.counters = ReconcilerCounters()
        self.order: Order[Fleet] = Order(evolve, Fleet())
        self._asking = SettleCache(self.policy, force=self.force)
        # decide only once this sequence has been read; None: first query the journal for its last sequence
        self._barrier: int | None = None
        self._backoff_s = BACKOFF_MIN_S
        self._pending_since = self.clock.monotonic()
        self._news = asyncio.Event()

    @property
    def leading(self) -> bool:
        """Whether this controller decides for the fleet: it holds the lease and has read to the end of the stream."""
        return self.lease.held and self._barrier is not None and self.order.last_seq >= self._barrier

    def wake(self) -> None:
        """Make the loop check for due decisions now instead of after `ask_s`."""
        self._news.set()

    async def run(self) -> None:
        """Read and decide until cancelled.

        Raise UnknownKind, OutOfOrder, StoreAhead or JournalChanged. After such an error the process must stop.
        """
        order, position = await begin(self.store)
        self.order = await join(self.journal, position, order)
        self.lease.listen(self._lease_changed)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(), name="reconciler-read")
                tasks.create_task(self._decide(), name="reconciler-decide")
        except BaseExceptionGroup as group:
            first = next((e for e in group.exceptions if isinstance(e, HoldfastError)), None)
            if first is None:
                raise
            log.error("reconciler_stopped", seq=self.order.last_seq, why=str(first))
            raise first from None

    def _lease_changed(self, held: bool) -> None:
        self._barrier = None
        self._news.set()

    async def _read(self) -> None:
        async for batch in self.journal.read(self.order.last_seq):
            had, decided = bool(self.order.pending), self.order.position.number
            for event in batch:
                self.order.take(event)
            if not had or self.order.position.number != decided:
                self._pending_since = self.clock.monotonic()
            self._news.set()

    # --- deciding ---------------------------------------------------------------------------------------------------

    async def _decide(self) -> None:
        while True:
            await pause(self._news, self.clock, self.ask_s)
            self._news.clear()
            if not self.lease.held:
                continue
            try:
                await self.step()
                self._backoff_s = BACKOFF_MIN_S
            except (Fenced, JournalUnavailable) as error:
                fenced = isinstance(error, Fenced)
                log.warning("append_fenced" if fenced else "append_unavailable", why=str(error))
                await self._back_off()

    async def step(self) -> Sequence[Decision]:
        """Compute the due decisions once, append them, and return them.

        Return () if none are due, or if the journal has not been read to its end yet. Raise Fenced if the journal has a
        decision that this controller has not read. Raise JournalUnavailable if the outcome is unknown.
        """
        if self._barrier is None:
            self._barrier = await self.journal.last_seq()
        if self.order.last_seq < self._barrier:
            return ()
        began = self.clock.monotonic()
        decisions = self._due()
        took = self.clock.monotonic() - began
        self.counters.settles += 1
        self.counters.settle_s += took
        if decisions:
            await self._append(decisions)
        elif took:
            await self.clock.sleep(took * (1 - BUSY_SHARE) / BUSY_SHARE)
        return decisions

    def _due(self) -> Sequence[Decision]:
        fleet, now = self.order.shown, self.clock.now()
        decisions = self._asking.due(fleet, now)
        if decisions:
            return decisions
        waited = self.clock.monotonic() - self._pending_since
        if absorption_due(len(self.order.pending), timedelta(seconds=waited)):
            return (absorbed(fleet, now),)
        return ()

    async def _append(self, decisions: Sequence[Decision]) -> None:
        """Append decisions in parts of at most `append_max`. The loop decides again only after reading the parts back.

        Each part is appended atomically and leaves a consistent state. So if a part fails, its decisions become due again.
        """
        through, after = self.order.last_seq, self.order.position.decided
        self._barrier = None  # unknown until the journal has acknowledged the append
        for start in range(0, len(decisions), self.append_max):
            part = decisions[start : start + self.append_max]
            after = await self.journal.append(part, through=through, after=after)
            self._landed(part, after)
        self._barrier = after

    def _landed(self, decisions: Sequence[Decision], seq: int) -> None:
        self.counters.decisions += len(decisions)
        for decision in decisions:
            fields = {name: value for name, value in to_builtins(decision).items() if value not in ("", None)}
            fields.pop("policy", None)
            log.info(decision.kind(), seq=seq, **fields)

    async def _back_off(self) -> None:
        """Wait before the next step: longer after each failure, with jitter.

        The next step reads to the end of the journal before it decides.
        """
        self._barrier = None
        await self.clock.sleep(self._backoff_s * random.uniform(0.5, 1.5))
        self._backoff_s = min(BACKOFF_MAX_S, self._backoff_s * 2)
        self._news.set()
