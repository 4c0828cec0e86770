"""Intrusion defence of one controller: the intake of workers' facts, and reports of forged facts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from controller.deciders.fold import Fleet
from controller.ports import Clock
from controller.runtime.host_processes import HostProcesses
from controller.runtime.intrusion.intake import FactIntake, JournalEnds
from controller.runtime.settings import ControllerBudgets
from events.broker_users import account_of
from events.errors import HoldfastError
from events.fact import Observation, Recorded
from events.intrusion.control_message import acknowledged
from events.intrusion.registration import impossible
from events.intrusion.reports import Intrusions
from events.intrusion.source_rule import forged
from events.observations import WorkerJoined


class WatchedFleet(Protocol):
    """The part of a FleetView that this module needs."""

    @property
    def fleet(self) -> Fleet: ...
    def listen(self, listener: Callable[[Any, Sequence[Recorded]], None]) -> None: ...


class FactJournal(JournalEnds, Protocol):
    """The part of a journal that this module needs."""

    def observe(self, fact: Observation) -> str: ...
    def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]: ...


class Intruders:
    """The intake and the intrusion reports of one controller."""

    def __init__(
        self,
        view: WatchedFleet,
        journal: FactJournal,
        clock: Clock,
        leading: Callable[[], bool],
        budgets: ControllerBudgets | None = None,
    ) -> None:
        self._view = view
        self._journal = journal
        self._lookup: asyncio.Task[None] | None = None
        self._leading = leading
        self.intrusions = Intrusions(journal.observe, clock.monotonic)
        self.intake = FactIntake(journal, self.intrusions.report, self._instance_of, clock.monotonic, budgets)
        self.processes = HostProcesses(report=self.intrusions.report)
        view.listen(self._on_batch)

    async def run(self, nats_url: str, name: str) -> None:
        """Serve the intake until cancelled."""
        await self.intake.run(nats_url, name)

    def foreign_lease(self, value: bytes) -> None:
        """Report a lease value that no controller has written. If it is an acknowledgement, name the publisher of the fact."""
        seq = acknowledged(value)
        if seq is None:
            self.intrusions.report("unknown", "write into the controllers' lease")
        elif self._lookup is None or self._lookup.done():
            self._lookup = asyncio.get_running_loop().create_task(self._blame_publisher(seq))

    async def _blame_publisher(self, seq: int) -> None:
        with contextlib.suppress(HoldfastError):
            async for batch in self._journal.read(seq - 1, until=seq):
                for recorded in batch:
                    name = str(getattr(recorded.fact, "worker", ""))
                    account = self._account_of(name) if recorded.seq == seq and name else "unknown"
                    tried = "have an acknowledgement sent into the controllers' lease"
                    known = self._instance_of(name)
                    self.intrusions.report(account, tried, worker=name, instance=known, eject=bool(known))

    def flooding(self, worker: str) -> None:
        """Report a worker that exceeds its heartbeat budget. Every controller receives heartbeats; the leader reports."""
        if self._leading():
            tried, known = "flood the controllers with heartbeats", self._instance_of(worker)
            self.intrusions.report(
                self._account_of(worker), tried, worker=worker, instance=known, eject=bool(known)
            )

    def _account_of(self, name: str) -> str:
        workers = self._view.fleet.workers
        worker = workers.get(name)
        return account_of(name, worker.joined.account if worker is not None else "")

    def _instance_of(self, name: str) -> str:
        workers = self._view.fleet.workers
        worker = workers.get(name)
        return worker.joined.instance if worker is not None and worker.alive else ""

    def _on_batch(self, view: Any, batch: Sequence[Recorded]) -> None:
        """Report forged facts that bypassed the intake: published to the journal directly, or on a broker without accounts."""
        if not self._leading():
            return
        for recorded in batch:
            fact = recorded.fact
            if isinstance(fact, WorkerJoined) and (why := impossible(fact)):
                account = account_of(fact.worker, fact.account)
                self.intrusions.report(account, f"register an impossible value: {why}", worker=fact.worker)
            if why := forged(fact, recorded.source):
                name = str(getattr(fact, "worker", ""))
                tried = f"publish as another source: {why}"
                self.intrusions.report(
                    self._account_of(name), tried, worker=name, instance=self._instance_of(name), eject=True
                )
