"""A whole fleet in one process: in-memory journal, leading controller, frontend, simulated workers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from frontend_kit import Kit, frontend
from json_types import Json
from memory_bus import MemoryBus
from memory_cell import MemoryCell
from memory_journal import MemoryJournal, MemoryStream
from real_worker import RealWorker
from waits import until

from controller.adapters.clock import SystemClock
from controller.adapters.request_plane.worker_links import Address
from controller.deciders.fleet import FleetPolicy
from controller.ports import Answer, Command
from controller.runtime.beats import Beats
from controller.runtime.commands import OperatorCommands
from controller.runtime.lease import Lease
from controller.runtime.operations import ControlOperations
from controller.runtime.reconciler import Reconciler
from controller.runtime.view import FleetView
from events.decisions import HealthChanged, HealthStatus
from events.fact import Recorded
from events.observations import CanaryFailed, CanaryPassed, WorkerJoined
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape

SHAPE = EngineShape(context_tokens=2048, kv_blocks=512)
LEASE_S = 1000.0  # renewals are held during a recording
COMMAND_S = 5.0
MOVING = {"setup_s": 0.0, "max_migration_time_ms": 10_000.0}  # generous, for a busy machine


@dataclass
class FleetInProcess:
    """One frontend, its workers and the controller, joined by a journal."""

    kit: Kit
    view: FleetView
    journal: MemoryJournal
    commands: OperatorCommands
    operations: ControlOperations

    def follow(self, view: FleetView, batch: Sequence[Recorded]) -> None:
        """Pass a batch to the frontend, as its process does."""
        self.commands.record_outcomes(batch)
        alive = [worker.joined for worker in view.fleet.workers.values() if worker.alive]
        self.kit.plane.set_workers({joined.worker: Address.of(joined) for joined in alive})
        self.kit.director.absorb(view.fleet, batch)

    async def add(self, name: str) -> RealWorker:
        """Start a worker, and wait until the frontend sends it requests."""
        worker = await RealWorker(name, SimulatedEngine(SHAPE)).start()
        self.kit.workers.append(worker)  # type: ignore[arg-type]
        identity: Json = {
            "worker": name,
            "instance": worker.instance,
            "url": worker.url,
            "model": "m",
        }
        self.journal.observe(WorkerJoined(**identity, **worker.facts))
        self.journal.observe(CanaryPassed(**self._canary(worker), check_type="join"))
        plane, fleet = self.kit.plane, self.view
        await until(lambda: name in fleet.fleet.workers and fleet.fleet.workers[name].health.weight == 1.0)
        await until(lambda: plane.connected.get(name) == worker.instance)
        return worker

    def convict(self, worker: RealWorker) -> None:
        """Let the frontend read a twice failed canary, and the controller's decision about it."""
        now, seq = datetime.now(UTC), self.view.seq
        failed = CanaryFailed(
            **self._canary(worker), check_type="scheduled", reason="token_mismatch", confirmed=True,
            golden="agreed", attempts=2,
        )  # fmt: skip
        decided = HealthChanged(
            worker=worker.name, instance=worker.instance, before=HealthStatus.HEALTHY, after=HealthStatus.UNHEALTHY,
            reason="token_mismatch", weight=0.0, decided_at=now, number=self.view.number + 1,
        )  # fmt: skip
        batch = [Recorded(seq + n, now, fact, f"e{n}") for n, fact in enumerate((failed, decided), 1)]
        self.view.take(batch)
        self.follow(self.view, batch)

    def _canary(self, worker: RealWorker) -> Json:
        """Return the common fields of a worker's canary results."""
        return {
            "worker": worker.name,
            "instance": worker.instance,
            "canary_key": worker.facts["canary_key"],
            "canary": "c1",
            "sent_under": self.view.number,
            "sent_at": datetime.now(UTC),
            "latency_ms": 1.0,
        }

    async def drain(self, name: str) -> Answer | None:
        """Execute `holdfast drain` as the controller that received it."""
        deadline = datetime.now(UTC) + timedelta(seconds=COMMAND_S)
        command = Command("command-1", deadline, "drain", name, "operator")

        async def act() -> str:
            return await self.operations.drain(name, None, command.by, command)

        return await self.commands.carry_out(command, act)


async def _no_store() -> None:
    """Return the state store's position: there is no store."""


async def _no_files() -> Json:
    """Return the sizes of journal and spools: there are none."""
    return {}


@asynccontextmanager
async def fleet_in_process() -> AsyncIterator[FleetInProcess]:
    """Run a frontend and a controller, without workers yet."""
    stream, clock = MemoryStream(), SystemClock()
    lease = Lease(MemoryCell(), "c1", clock, ttl_s=LEASE_S)
    ours = MemoryJournal(stream, "controller:c1")
    reconciler = Reconciler(ours, lease, FleetPolicy(), clock, force=lambda fleet: None)
    view = FleetView(MemoryJournal(stream, "frontend:f1"))
    commands = OperatorCommands(
        ours, clock, seq=lambda: view.seq, leading=lambda: reconciler.leading, vacant=lambda: False
    )
    operations = ControlOperations(
        fleet=lambda: view.fleet, leader=lambda: "c1", present=lambda: [], projected=_no_store, stored=_no_files,
        journal=ours, bus=MemoryBus(), beats=Beats(clock), injects_faults=False,
    )  # fmt: skip
    async with frontend(moving=MOVING) as kit:
        fleet = FleetInProcess(kit, view, MemoryJournal(stream, "test"), commands, operations)
        view.listen(fleet.follow)
        running = [asyncio.create_task(part.run()) for part in (lease, reconciler, view)]
        try:
            await until(lambda: reconciler.leading)
            yield fleet
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
