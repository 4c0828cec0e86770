"""What one controller does about intruders: it takes workers' facts in, and reports what the journal shows to be forged."""

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
    """What is needed of a FleetView."""

    @property
    def fleet(self) -> Fleet: ...
    def listen(self, listener: Callable[[Any, Sequence[Recorded]], None]) -> None: ...


class SayingJournal(JournalEnds, Protocol):
    """What is needed of a journal."""

    def observe(self, fact: Observation) -> str: ...
    def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]: ...


class Intruders:
    """The intake, and the reports of one controller."""

    def __init__(
        self,
        view: WatchedFleet,
        journal: SayingJournal,
        clock: Clock,
        leading: Callable[[], bool],
        budgets: ControllerBudgets | None = None,
    ) -> None:
        self._view = view
        self._journal = journal
        self._looking: asyncio.Task[None] | None = None
        self._leading = leading
        self.intrusions = Intrusions(journal.observe, clock.monotonic)
        self.intake = FactIntake(journal, self.intrusions.report, self._instance_of, clock.monotonic, budgets)
        self.processes = HostProcesses(report=self.intrusions.report)
        view.listen(self._heard)

    async def run(self, nats_url: str, name: str) -> None:
        """Take facts in until cancelled."""
        await self.intake.run(nats_url, name)

    def foreign_lease(self, value: bytes) -> None:
        """Report bytes in the lease that no controller has written. An acknowledgement names the fact whose publisher sent it."""
        seq = acknowledged(value)
        if seq is None:
            self.intrusions.report("unknown", "write into the controllers' lease")
        elif self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._blame_publisher(seq))

    async def _blame_publisher(self, seq: int) -> None:
        with contextlib.suppress(HoldfastError):
            async for batch in self._journal.read(seq - 1, until=seq):
                for recorded in batch:
                    name = str(getattr(recorded.fact, "worker", ""))
                    who = self._account_of(name) if recorded.seq == seq and name else "unknown"
                    tried = "have an acknowledgement sent into the controllers' lease"
                    known = self._instance_of(name)
                    self.intrusions.report(who, tried, worker=name, instance=known, eject=bool(known))

    def flooding(self, worker: str) -> None:
        """Report a worker that publishes more heartbeats than it may. Every controller hears them; the leader reports."""
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

    def _heard(self, view: Any, batch: Sequence[Recorded]) -> None:
        """Report what reached the journal past an intake: of a worker that publishes there itself, or on a broker without
        accounts."""
        if not self._leading():
            return
        for recorded in batch:
            fact = recorded.fact
            if isinstance(fact, WorkerJoined) and (why := impossible(fact)):
                who = account_of(fact.worker, fact.account)
                self.intrusions.report(who, f"register an impossible value: {why}", worker=fact.worker)
            if why := forged(fact, recorded.source):
                name = str(getattr(fact, "worker", ""))
                tried = f"publish as another source: {why}"
                self.intrusions.report(
                    self._account_of(name), tried, worker=name, instance=self._instance_of(name), eject=True
                )
