"""Which dead instances' processes live all the same, since nobody ends them? Says WorkerLingered, once per instance.

    DEAD ── its process is seen for LINGERS_AFTER_S ──▶ lingers ── it is gone, or a successor has joined ──▶ forgotten

`holdfast up` ends such a process within GRACE_S of the decision, and one that wakes is told to end by the actuator; other
supervisors wait for a process to end by itself, which one that is stopped or hangs never does. Then no successor comes, and
a person must know.

What a reader would get wrong: that nothing is heard of it proves nothing, for it may hang. Its process proves it where we
are on its host; elsewhere its port, which the system keeps open as long as there is a process, hung or not.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import structlog

from controller.deciders.fleet import Fleet, Worker
from controller.ports import Clock
from controller.runtime.beats import Beats, Life
from controller.runtime.host_processes import HostProcesses
from events.fact import Observation
from events.observations import WorkerLingered

LOOK_S = 5.0
LINGERS_AFTER_S = 15.0  # a supervisor of ours needs a third of it
BEAT_FRESH_S = 3.0
TOGETHER = 64  # ports tried at once

log = structlog.get_logger(__name__)


class Seen(Protocol):
    """What it needs of a FleetView."""

    @property
    def fleet(self) -> Fleet: ...


class Told(Protocol):
    """What it needs of a journal."""

    source: str

    def observe(self, fact: Observation) -> str: ...


class Lingering:
    """The watch over the dead, while its controller leads."""

    def __init__(
        self,
        view: Seen,
        beats: Beats,
        journal: Told,
        processes: HostProcesses,
        port_open: Callable[[str], Awaitable[bool]],
        clock: Clock,
        leading: Callable[[], bool],
    ) -> None:
        """`port_open` says of a worker's URL whether something listens there."""
        self._view = view
        self._beats = beats
        self._journal = journal
        self._processes = processes
        self._port_open = port_open
        self._clock = clock
        self._leading = leading
        self._since: dict[Life, float] = {}  # dead, and seen to live
        self._said: set[Life] = set()

    @property
    def count(self) -> int:
        """How many linger."""
        return len(self._said)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self.look()
            await self._clock.sleep(LOOK_S)

    async def look(self) -> None:
        """Look once after all who are dead."""
        fleet = self._view.fleet  # also of those that were forgotten meanwhile
        workers = {**fleet.departed, **fleet.workers} if self._leading() else {}
        dead = [worker for worker in workers.values() if not worker.alive and not worker.health.exit.left]
        seen = {_life(worker): (worker, evidence) for worker, evidence in await self._evidence(dead)}
        now = self._clock.monotonic()
        self._since = {life: self._since.get(life, now) for life in seen}
        self._said &= seen.keys()
        for life, (worker, evidence) in seen.items():
            if now - self._since[life] >= LINGERS_AFTER_S and life not in self._said:
                self._said.add(life)
                self._say(worker, evidence, now - self._since[life])

    async def _evidence(self, dead: list[Worker]) -> Iterable[tuple[Worker, str]]:
        """Return what shows of each of these that its process lives, if anything does."""
        places = asyncio.Semaphore(TOGETHER)

        async def of(worker: Worker) -> tuple[Worker, str]:
            async with places:
                return worker, await self._shown(worker)

        return [(worker, shown) for worker, shown in await asyncio.gather(*map(of, dead)) if shown]

    async def _shown(self, worker: Worker) -> str:
        if self._beats.fresh(*_life(worker), BEAT_FRESH_S) is not None:
            return "beat"
        if self._processes.here(worker):
            return "process" if self._processes.live(worker) else ""
        url = worker.joined.url
        workers = self._view.fleet.workers
        if any(other.joined.url == url and name != worker.joined.worker for name, other in workers.items()):
            return ""  # the port is another's now
        return "port" if await self._port_open(url) else ""

    def _say(self, worker: Worker, evidence: str, seconds: float) -> None:
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
