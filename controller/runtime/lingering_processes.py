"""Detects processes that outlive their dead instance, and reports WorkerLingered, once per instance.

    DEAD ── its process is seen for LINGERS_AFTER_S ──▶ lingers ── it is gone, or a successor has joined ──▶ dropped

`holdfast up` ends such a process within GRACE_S of the decision, and the actuator commands a resumed one to end. Other
supervisors wait for a process to end by itself, which a stopped or hung one never does. Then no successor starts, so an
operator must be notified.

The absence of heartbeats proves nothing, for the process may hang. On its host, the process itself is the evidence; elsewhere
its port is, which the system keeps open as long as the process exists, hung or not.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog

from controller.deciders.fleet import Worker
from controller.ports import Clock
from controller.runtime.beats import Beats, Life
from controller.runtime.host_processes import HostProcesses
from controller.runtime.liveness import FactRecorder, FleetSource
from events.observations import WorkerLingered

LOOK_S = 5.0
LINGERS_AFTER_S = 15.0  # `holdfast up` ends a process in a third of this time
BEAT_FRESH_S = 3.0
TOGETHER = 64  # ports probed concurrently

log = structlog.get_logger(__name__)


class Lingering:
    """Watches for lingering processes while its controller leads."""

    def __init__(
        self,
        view: FleetSource,
        beats: Beats,
        journal: FactRecorder,
        processes: HostProcesses,
        port_open: Callable[[str], Awaitable[bool]],
        clock: Clock,
        leading: Callable[[], bool],
    ) -> None:
        """`port_open` returns whether a process listens at a worker's URL."""
        self._view = view
        self._beats = beats
        self._journal = journal
        self._processes = processes
        self._port_open = port_open
        self._clock = clock
        self._leading = leading
        self._since: dict[Life, float] = {}  # by dead instance: when its process was first seen
        self._reported: set[Life] = set()

    @property
    def count(self) -> int:
        """Number of lingering instances."""
        return len(self._reported)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self.look()
            await self._clock.sleep(LOOK_S)

    async def look(self) -> None:
        """Check all dead instances once."""
        fleet = self._view.fleet  # departed: dead workers that were removed from the fleet meanwhile
        workers = {**fleet.departed, **fleet.workers} if self._leading() else {}
        dead = [worker for worker in workers.values() if not worker.alive and not worker.health.exit.left]
        seen = {_life(worker): (worker, evidence) for worker, evidence in await self._evidence(dead)}
        now = self._clock.monotonic()
        self._since = {life: self._since.get(life, now) for life in seen}
        self._reported &= seen.keys()
        for life, (worker, evidence) in seen.items():
            if now - self._since[life] >= LINGERS_AFTER_S and life not in self._reported:
                self._reported.add(life)
                self._report(worker, evidence, now - self._since[life])

    async def _evidence(self, dead: list[Worker]) -> Iterable[tuple[Worker, str]]:
        """Return those of the dead workers that still have a process, each with the evidence."""
        places = asyncio.Semaphore(TOGETHER)

        async def of(worker: Worker) -> tuple[Worker, str]:
            async with places:
                return worker, await self._evidence_of(worker)

        return [(worker, shown) for worker, shown in await asyncio.gather(*map(of, dead)) if shown]

    async def _evidence_of(self, worker: Worker) -> str:
        if self._beats.fresh(*_life(worker), BEAT_FRESH_S) is not None:
            return "beat"
        if self._processes.here(worker):
            return "process" if self._processes.live(worker) else ""
        url = worker.joined.url
        workers = self._view.fleet.workers
        if any(other.joined.url == url and name != worker.joined.worker for name, other in workers.items()):
            return ""  # another worker has the port now
        return "port" if await self._port_open(url) else ""

    def _report(self, worker: Worker, evidence: str, seconds: float) -> None:
        joined = worker.joined
        log.warning("worker_lingers", worker=joined.worker, pid=joined.pid, evidence=evidence)
        self._journal.observe(
            WorkerLingered(
                worker=joined.worker,
                instance=joined.instance,
                pid=joined.pid,
                host=joined.topology.host,
                evidence=evidence,
                dead_s=round(seconds, 3),
                observer=self._journal.source,
            )
        )


def _life(worker: Worker) -> Life:
    return worker.joined.worker, worker.joined.instance
